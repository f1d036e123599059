"""Measure the built-in model on word combinations it never saw: ``python -m tiny_world.evaluate``.

Every figure comes from frames of the public pipeline, read by plain vision code, with n and a Wilson 95 % interval.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from flashdreams import load_pipeline
from flashdreams.infra.pipeline import StreamInferencePipeline
from tiny_world._data import render, sample_clips
from tiny_world._measure import (
    Scores,
    empty_context,
    frames_at,
    last_frames,
    prompts_with_keys,
    read_all,
    score_actions,
    score_content,
    score_motion,
)

LONG_MARKS = (4, 16, 64, 128, 256, 512, 1024)


def measure_text(pipeline: StreamInferencePipeline, scores: Scores, n: int, seed: int, split: str, blank: bool) -> None:
    """Content at chunks 0, 1 and 4 and the motion of chunk 1, from captions alone."""
    clips = sample_clips(seed, n, 1, split, with_actions=False)  # ty: ignore[invalid-argument-type]
    name = f"text, {'empty prompt' if blank else split}"
    prompts = [""] * n if blank else None
    first = None
    for i, frames in enumerate(last_frames(pipeline, clips, 5, seed=seed, prompts=prompts)):
        if i in (0, 1, 4):
            readings = read_all(frames)
            score_content(scores, f"{name}, chunk {i}", clips, readings)
            if i == 0:
                first = readings
            elif i == 1 and first is not None:
                score_motion(scores, f"{name}: motion", clips, first, readings)


def measure_actions(
    pipeline: StreamInferencePipeline, scores: Scores, n: int, chunks: int, seed: int, mode: str, split: str
) -> None:
    """Key following, chunk by chunk. ``mode``: keys, image, or an ablation: keys not sent, context emptied."""
    clips = prompts_with_keys(n, chunks, seed, split)
    name, held = f"keys, {mode}", clips.actions[:, ::4]
    between = empty_context if mode == "context emptied" else None
    stream = last_frames(
        pipeline, clips, chunks, seed=seed, acted=mode != "keys not sent", from_image=mode == "image", between=between
    )
    before = None
    for i, frames in enumerate(stream):
        readings = read_all(frames)
        if before is not None:
            score_actions(scores, name, held[:, i], before, readings)
        before = readings
    assert before is not None
    score_content(scores, f"{name}, chunk {chunks - 1}", clips, before)


def measure_long(pipeline: StreamInferencePipeline, scores: Scores, n: int, chunks: int, seed: int, split: str) -> None:
    """Content along a long rollout under random keys."""
    clips = prompts_with_keys(n, chunks, seed, split)
    marks = {mark for mark in LONG_MARKS if mark <= chunks} | {chunks}
    for mark, frames in frames_at(pipeline, clips, chunks, sorted(marks), seed):
        readings = read_all(frames)
        score_content(scores, f"long, after {mark} chunks", clips, readings)
        for reading in readings:
            scores.note(f"long, after {mark} chunks: IoU", reading.iou)


def measure_ceiling(pipeline: StreamInferencePipeline, scores: Scores, n: int, seed: int, split: str) -> None:
    """The vision code on encoded and decoded ground truth: what a perfect network would score."""
    clips = sample_clips(seed, n, 9, split)  # ty: ignore[invalid-argument-type]
    video = torch.from_numpy(render(clips)).permute(0, 4, 1, 2, 3).float() / 127.5 - 1
    codec = pipeline.decoder
    for part in range(0, n, 16):
        with torch.inference_mode():
            latent = codec.encode(video[part : part + 16], codec.initialize_cache())
            decoded = codec.decode(latent, codec.initialize_cache())
        frames = ((decoded[:, :, -1] + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()
        for i, reading in enumerate(read_all(frames), start=part):
            scores.add("codec alone: colour", reading.colour == clips.colour[i])
            scores.add("codec alone: shape", reading.shape == clips.shape[i])
            scores.add("codec alone: background", reading.background == clips.background[i])
        error = (decoded - video[part : part + 16]).square().mean(dim=(1, 2, 3, 4))
        for value in 10 * torch.log10(4 / error):
            scores.note("codec alone: PSNR (dB)", float(value))


def table(scores: Scores) -> str:
    """Markdown: name, rate, interval, n; then means of plain numbers."""
    lines = ["| measure | result | 95 % interval | n |", "|---|---|---|---|"]
    for name, score in scores.counts.items():
        low, high = score.interval
        lines.append(f"| {name} | {100 * score.rate:.1f} % | {100 * low:.1f}-{100 * high:.1f} | {score.n} |")
    for name, values in scores.values.items():
        mean = sum(values) / len(values)
        lines.append(f"| {name} | mean {mean:.2f} | | {len(values)} |")
    return "\n".join(lines)


PARTS = ("ceiling", "text", "keys", "image", "ablations", "long")


def evaluate(pipeline: StreamInferencePipeline, args: argparse.Namespace) -> Scores:
    scores = Scores()
    for seed in args.seeds:
        if "ceiling" in args.parts:
            measure_ceiling(pipeline, scores, args.n, seed, args.split)
        if "text" in args.parts:
            measure_text(pipeline, scores, args.n, seed, args.split, blank=False)
        if "keys" in args.parts:
            measure_actions(pipeline, scores, args.n // 2, 12, seed, "text", args.split)
        if "image" in args.parts:
            measure_actions(pipeline, scores, args.n // 2, 12, seed, "image", args.split)
        if "ablations" in args.parts:
            measure_text(pipeline, scores, args.n, seed, args.split, blank=True)
            measure_actions(pipeline, scores, args.n // 2, 8, seed, "keys not sent", args.split)
            measure_actions(pipeline, scores, args.n // 2, 8, seed, "context emptied", args.split)
    if "long" in args.parts:
        measure_long(pipeline, scores, args.long_n, args.chunks, args.seeds[0], args.split)
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tiny_world.evaluate", description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--n", type=int, default=64, help="rollouts per seed and measure")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--chunks", type=int, default=256, help="length of the long rollouts")
    parser.add_argument("--long-n", type=int, default=64, help="number of long rollouts")
    parser.add_argument("--split", choices=("heldout", "train", "all"), default="heldout", help="word combinations")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    scores = evaluate(load_pipeline("tiny-world", device="cpu"), args)
    print(table(scores))
    if args.json:
        counts = {k: {"hits": s.hits, "n": s.n, "interval": s.interval} for k, s in scores.counts.items()}
        args.json.write_text(json.dumps({"scores": counts, "values": scores.values}, indent=1))


if __name__ == "__main__":
    main()
