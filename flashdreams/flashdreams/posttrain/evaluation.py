"""Measurement on prompts that training never meets, with the sampler of serving."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from flashdreams.core.media.video import VideoWriter
from flashdreams.core.noise import KeyedNoise
from flashdreams.posttrain.reward import Reward

if TYPE_CHECKING:
    from flashdreams.infra.pipeline import StreamInferencePipeline

EVAL_SEED = 2**32
"""The same for every training, so that before and after, and several seeds, are measured on the same noise."""


@torch.no_grad()
def evaluate(
    pipeline: StreamInferencePipeline,
    reward: Reward,
    prompts: Sequence[str],
    *,
    num_chunk: int,
    batch: int,
    videos: dict[int, Path] | None = None,
) -> dict[str, float]:
    """Mean of each of the reward's numbers over one rollout of each prompt, and the standard error of the reward.

    Args:
        videos: files to write, by the number of the prompt.
    """
    scores: dict[str, list[float]] = {}
    for begin in range(0, len(prompts), batch):
        part = list(prompts[begin : begin + batch])
        noise = KeyedNoise(EVAL_SEED, tuple(str(begin + i) for i in range(len(part))))
        chunks = [chunk.frames for chunk in pipeline.rollout(part, num_chunk=num_chunk, noise=noise)]
        frames = torch.cat(chunks, dim=1)
        for name, values in reward.score(frames, part).items():
            scores.setdefault(name, []).extend(values.tolist())
        for i, path in (videos or {}).items():
            if begin <= i < begin + len(part):
                write_video(path, frames[i - begin], pipeline.config.fps)
    means = {name: sum(values) / len(values) for name, values in scores.items()}
    if len(prompts) > 1:
        rewards = torch.tensor(scores["reward"], dtype=torch.float64)
        means["reward_error"] = float(rewards.std() / len(rewards) ** 0.5)
    return means


def write_video(path: Path, frames: torch.Tensor, fps: float) -> None:
    """``frames`` uint8 ``[T, H, W, 3]`` as an mp4 file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with VideoWriter(path, Fraction(fps).limit_denominator(1001), *frames.shape[1:3]) as writer:
        writer.write(frames.numpy())
