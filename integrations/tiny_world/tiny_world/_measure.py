"""Measurements of rollouts by plain vision code, as counts of successes and trials."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from flashdreams.infra.pipeline import StreamInferencePipeline
from flashdreams.infra.rollout import Rollout, to_uint8
from tiny_world._data import DIRECTION, HIGH, LOW, SPEED, Clips, render, sample_clips
from tiny_world._vision import Reading, read_frame
from tiny_world._words import ACTIONS, MOTIONS

VALID_IOU = 0.55
CHUNK_PX = 4 * SPEED
"""Displacement of one chunk at full speed, px."""


@dataclass
class Score:
    """``hits`` of ``n`` trials."""

    hits: int = 0
    n: int = 0

    def add(self, success: bool) -> None:
        self.hits += bool(success)
        self.n += 1

    @property
    def rate(self) -> float:
        return self.hits / self.n if self.n else float("nan")

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson 95 % interval."""
        if not self.n:
            return 0.0, 1.0
        z, n, p = 1.959964, self.n, self.rate
        middle = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        return max(0.0, middle - half), min(1.0, middle + half)


@dataclass
class Scores:
    """Named scores in order of first use, and named lists of plain numbers."""

    counts: dict[str, Score] = field(default_factory=dict)
    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, success: bool) -> None:
        self.counts.setdefault(name, Score()).add(success)

    def note(self, name: str, value: float) -> None:
        self.values.setdefault(name, []).append(value)


Between = Callable[[Rollout], None]
"""What an ablation does to a rollout after each chunk."""


@torch.inference_mode()
def empty_context(rollout: Rollout) -> None:
    """Zero every committed key and value: the model forgets what it has shown."""
    rollout.flush()
    for expert in rollout.cache.experts:
        for branch in expert.branches:
            for block in branch.blocks:
                block.self_kv.k.zero_()
                block.self_kv.v.zero_()


def last_frames(
    pipeline: StreamInferencePipeline,
    clips: Clips,
    num_chunk: int,
    *,
    seed: int,
    prompts: Sequence[str] | None = None,
    acted: bool = False,
    from_image: bool = False,
    between: Between | None = None,
) -> Iterator[np.ndarray]:
    """Roll out all clips as one batch; yields the last frame of each chunk, uint8 ``[n, 128, 128, 3]``."""
    control = [[ACTIONS[a] for a in row] for row in clips.actions] if acted else None
    image = torch.from_numpy(render(first_frames(clips))[:, 0].copy()) if from_image else None
    rollout = pipeline.rollout(
        list(prompts if prompts is not None else clips.captions),
        seed=seed, num_chunk=num_chunk, control=control, image=image,
    )  # fmt: skip
    for chunk in rollout:
        yield chunk.frames[:, -1].numpy()
        if between is not None and chunk.index + 1 < num_chunk:
            between(rollout)


def frames_at(
    pipeline: StreamInferencePipeline, clips: Clips, num_chunk: int, marks: Sequence[int], seed: int
) -> Iterator[tuple[int, np.ndarray]]:
    """Roll out under the clips' keys, decoding only where asked; yields ``(mark, last frames)`` after ``mark`` chunks.

    A frame depends on its latent and the two before it (one per temporal block), so three latents decode it exactly.
    """
    cache = pipeline.initialize_cache(clips.captions, seed=seed)
    recent: deque[Tensor] = deque(maxlen=3)
    for i in range(num_chunk):
        frames = slice(max(0, 4 * i - 3), 4 * i + 1)
        controls = [[ACTIONS[a] for a in row[frames]] for row in clips.actions]
        with torch.inference_mode():
            recent.append(pipeline.diffusion_model.generate(i, cache, pipeline.encode_controls(controls, i, cache)))
        pipeline.finalize(i, cache)
        if i + 1 in marks:
            with torch.inference_mode():
                parts = [pipeline.decoder.decode(x, pipeline.decoder.initialize_cache())[:, :, -1:]
                         for x in torch.cat(list(recent), dim=2).split(16)]  # fmt: skip
            yield i + 1, to_uint8(torch.cat(parts))[:, 0].numpy()


def first_frames(clips: Clips) -> Clips:
    """The same clips, one frame long."""
    one = {"actions": clips.actions[:, :1], "centres": clips.centres[:, :1]}
    return dataclasses.replace(clips, **one)


def read_all(frames: np.ndarray) -> list[Reading]:
    return [read_frame(frame) for frame in frames]


def score_content(scores: Scores, name: str, clips: Clips, readings: Sequence[Reading]) -> None:
    """Colour, shape, background, stripes, and all of it with a clean outline ("valid")."""
    for i, reading in enumerate(readings):
        colour, shape = reading.colour == clips.colour[i], reading.shape == clips.shape[i]
        background = reading.background == clips.background[i]
        scores.add(f"{name}: colour", colour)
        scores.add(f"{name}: shape", shape)
        scores.add(f"{name}: background", background)
        scores.add(f"{name}: stripes", reading.striped == clips.striped[i])
        scores.add(f"{name}: valid", colour and shape and background and reading.iou > VALID_IOU)


def score_motion(scores: Scores, name: str, clips: Clips, before: Sequence[Reading], after: Sequence[Reading]) -> None:
    """Does the first moving chunk do what the caption says? Starts with less than a chunk of room are left out."""
    for i, motion in enumerate(clips.motion):
        start, moved = np.array(before[i].centre), np.array(after[i].centre) - np.array(before[i].centre)
        if not np.isfinite(moved).all():
            scores.add(name, False)
        elif MOTIONS[motion] == "still":
            scores.add(name, bool(np.abs(moved).max() < CHUNK_PX / 4))
        elif MOTIONS[motion] == "bounce":
            if room(start, moved) > CHUNK_PX:
                scores.add(name, bool(np.abs(moved).min() > CHUNK_PX / 4))
        elif room(start, DIRECTION[motion]) > CHUNK_PX:
            scores.add(name, follows(moved, DIRECTION[motion]))


def score_actions(
    scores: Scores, name: str, held: np.ndarray, before: Sequence[Reading], after: Sequence[Reading]
) -> None:
    """Does a chunk with one key held throughout (``held`` ``[n]``) move that way? Half a chunk of room is needed."""
    for i, action in enumerate(held):
        if action <= 0:
            continue
        start, moved = np.array(before[i].centre), np.array(after[i].centre) - np.array(before[i].centre)
        space = room(start, DIRECTION[action])
        if not np.isfinite(moved).all():
            scores.add(name, False)
        elif space >= CHUNK_PX / 2:
            scores.add(name, follows(moved, DIRECTION[action]))
            wanted = min(CHUNK_PX, space) * DIRECTION[action]
            scores.note(f"{name}: displacement error (px)", float(np.abs(moved - wanted).sum()))


def room(start: np.ndarray, direction: np.ndarray) -> float:
    """Pixels to the nearest wall in ``direction``; NaN where nothing was seen."""
    ahead = [(HIGH - s if d > 0 else s - LOW) for s, d in zip(start, direction, strict=True) if abs(d) > 1e-6]
    return float(min(ahead)) if ahead else math.inf


def follows(moved: np.ndarray, direction: np.ndarray) -> bool:
    """More than 2 px the right way, and more than sideways."""
    along = float(moved @ direction)
    return along > 2 and along > float(np.abs(moved - along * direction).max())


def held_keys(num_chunk: int, n: int, seed: int) -> np.ndarray:
    """Actions per frame ``[n, 1 + 4 (num_chunk - 1)]``: keys held for 1-4 whole chunks, never "none"."""
    rng = np.random.default_rng([seed, n, num_chunk])
    per_chunk = np.zeros((n, num_chunk), np.int64)
    for row in per_chunk:
        chunk = 1
        while chunk < num_chunk:
            length = int(rng.integers(1, 5))
            row[chunk : chunk + length] = rng.integers(1, len(ACTIONS))
            chunk += length
    return np.repeat(per_chunk, 4, axis=1)[:, 3:]


def prompts_with_keys(n: int, num_chunk: int, seed: int, split: str) -> Clips:
    """Clips of ``split`` whose actions are :func:`held_keys`."""
    clips = sample_clips(seed, n, 1, split)  # ty: ignore[invalid-argument-type]
    return dataclasses.replace(clips, actions=held_keys(num_chunk, n, seed))
