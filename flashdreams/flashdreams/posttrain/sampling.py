"""Samples of an iteration, in groups that are compared with one another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashdreams.infra.diffusion_model import VIDEO
from flashdreams.rollout.plan import Plan
from flashdreams.rollout.rollout import rollout
from flashdreams.rollout.segment import Segment

if TYPE_CHECKING:
    from flashdreams.infra.pipeline import StreamInferencePipeline


@dataclass(frozen=True)
class Batch:
    """Samples that were rolled out together: a segment, its frames uint8 ``[B, T, H, W, 3]``, its prompts."""

    segment: Segment
    frames: Tensor
    prompts: list[str]


def sample_groups(
    pipeline: StreamInferencePipeline,
    plan: Plan,
    prompts: Sequence[str],
    *,
    group_size: int,
    batch: int,
    num_chunk: int,
    first_chunk: int,
    seed: int,
) -> list[Batch]:
    """``group_size`` samples of each prompt. A group has one beginning, made once and given to all of its samples up to
    ``first_chunk``; from there on each has its own noise.

    Args:
        batch: samples at once, in whole groups; the noise of a sample does not depend on it.
        seed: of the noise, another one in each iteration.
    """
    at_once, batches = max(1, batch // group_size), []
    for begin in range(0, len(prompts), at_once):
        groups = range(begin, min(begin + at_once, len(prompts)))
        options: dict[str, Any] = {}
        if first_chunk:
            of_groups = [prompts[group] for group in groups]
            start = rollout(
                pipeline, of_groups, plan, num_chunk=first_chunk, seed=seed, sample_ids=[str(group) for group in groups]
            )
            latents = torch.cat([chunk.clean[VIDEO] for chunk in start.chunks], dim=2)
            options["initial_latents"] = latents.repeat_interleave(group_size, dim=0)
        ids = [f"{group}/{member}" for group in groups for member in range(group_size)]
        of_samples = [prompts[group] for group in groups for _ in range(group_size)]
        frames: list[Tensor] = []
        segment = rollout(
            pipeline, of_samples, plan, num_chunk=num_chunk, seed=seed, sample_ids=ids,
            on_chunk=lambda chunk, frames=frames: frames.append(chunk.frames), **options,
        )  # fmt: skip
        batches.append(Batch(segment, torch.cat(frames, dim=1), of_samples))
    return batches
