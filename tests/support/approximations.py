"""What each approximation saves and what it costs, measured on tiny-world: ``python tests/support/approximations.py``.

One process, the same prompts and seed throughout. Latents and frames are compared with those of the exact run.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flashdreams.acceleration.offload import Offload, bytes_of, offload_blocks
from flashdreams.acceleration.transfer import DirectCopies
from flashdreams.config import derive_config
from flashdreams.infra.acceleration_config import AccelerationConfig
from flashdreams.infra.errors import UserError
from flashdreams.infra.load import load_pipeline
from flashdreams.infra.pipeline import StreamInferencePipeline
from flashdreams.plugins.registry import get_runner
from tiny_world._data import sample_clips
from tiny_world._measure import Scores, read_all, score_content


@dataclass
class Run:
    """One way to run the model, on all prompts."""

    latents: Tensor
    frames: Tensor
    seconds: float
    """Median of the CPU's time for a chunk, which other work on the machine does not change; the first is left out."""
    device: int
    """Bytes of the transformer's weights on the device."""
    context: int
    """Bytes of keys and values of one sample."""
    valid: float
    """Share of the last frames in which plain vision code sees what the prompt says, with a clean outline."""


Way = Callable[[], tuple[StreamInferencePipeline, Offload | None]]


def accelerated(**changes: Any) -> Way:
    config = AccelerationConfig(compile="off", **changes)
    return lambda: (load_pipeline("tiny-world", device="cpu", acceleration=config), None)


def steps(count: int) -> Way:
    config = derive_config(get_runner("tiny-world").pipeline, {"diffusion_model.scheduler.num_steps": count})
    return lambda: (load_pipeline(config, device="cpu", acceleration=AccelerationConfig(compile="off")), None)


def offloaded() -> tuple[StreamInferencePipeline, Offload | None]:
    """From memory to memory: the copies are real, and nothing computes beside them as on a GPU."""
    pipeline, _ = accelerated()()
    return pipeline, offload_blocks(pipeline.diffusion_model, DirectCopies())


WAYS: dict[str, Way] = {
    "exact": accelerated(),
    "exact again": accelerated(),
    "offload blocks": offloaded,
    "quantize int8": accelerated(quantize="int8"),
    "quantize int8-dynamic": accelerated(quantize="int8-dynamic"),
    "kv_dtype int8": accelerated(kv_dtype="int8"),
    "kv_dtype fp8": accelerated(kv_dtype="fp8"),
    "quantize int8, kv_dtype int8": accelerated(quantize="int8", kv_dtype="int8"),
    "3 steps": steps(3),
    "2 steps": steps(2),
    "1 step": steps(1),
}


def measure(way: Way, clips: Any, chunks: int, seed: int) -> Run:
    pipeline, offload = way()
    latents, frames, seconds, context = [], [], [], 0
    with pipeline.rollout(list(clips.captions), seed=seed, num_chunk=chunks) as rollout:
        for _ in range(chunks):
            begun = time.process_time()
            chunk = next(rollout)
            rollout.flush()
            seconds.append(time.process_time() - begun)
            latents.append(chunk.latent)
            frames.append(chunk.frames)
            context = held(rollout.cache.experts) // len(clips.captions)
    scores = Scores()
    score_content(scores, "last", clips, read_all(list(frames[-1][:, -1].numpy())))
    transformer = pipeline.diffusion_model.transformer
    weights = sum(size(tensor) for tensor in transformer.state_dict().values())
    if offload is not None:
        weights += offload.resident - sum(map(bytes_of, transformer.blocks))
    return Run(
        torch.cat(latents, dim=2), torch.cat(frames, dim=1), statistics.median(seconds[1:]), weights, context,
        scores.counts["last: valid"].rate,
    )  # fmt: skip


def held(experts: list[Any]) -> int:
    """Bytes of all rolling caches."""
    caches = [block.self_kv for expert in experts for branch in expert.branches for block in branch.blocks]
    return sum(size(value) for cache in caches for value in vars(cache).values() if isinstance(value, Tensor))


def size(tensor: Tensor) -> int:
    """Bytes, also of a library's quantized weights, which are several tensors."""
    if type(tensor) in (Tensor, nn.Parameter):
        return tensor.numel() * tensor.element_size()
    names, _ = tensor.__tensor_flatten__()
    return sum(size(part) for name in names if isinstance(part := getattr(tensor, name), Tensor))


def psnr(frames: Tensor, exact: Tensor) -> float:
    """Decibels, of uint8 frames; infinite where they are equal."""
    error = (frames.double() - exact.double()).square().mean()
    return float(10 * torch.log10(255**2 / error))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", type=int, default=8, help="rollouts, in one batch")
    parser.add_argument("--chunks", type=int, default=8, help="length, in chunks of four frames; the window is six")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=WAYS, help="leave the others out")
    args = parser.parse_args()
    clips = sample_clips(args.seed, args.prompts, 1, "heldout", with_actions=False)
    exact: Run | None = None
    print("| way | weights, MiB | context, MiB | time | largest error of latents | PSNR, first chunk | PSNR | valid |")
    print("|---|---|---|---|---|---|---|---|")
    for name, way in WAYS.items():
        if args.only and name not in ("exact", *args.only):
            continue
        try:
            run = measure(way, clips, args.chunks, args.seed)
        except UserError as error:
            print(f"| {name} | {error} |", flush=True)
            continue
        exact = exact or run
        print(
            f"| {name} | {run.device / 2**20:.2f} | {run.context / 2**20:.2f} | {run.seconds / exact.seconds:.2f} | "
            f"{(run.latents - exact.latents).abs().max():.3g} | {psnr(run.frames[:, :1], exact.frames[:, :1]):.1f} | "
            f"{psnr(run.frames, exact.frames):.1f} | {100 * run.valid:.0f} % |", flush=True,
        )  # fmt: skip


if __name__ == "__main__":
    main()
