"""Make a segment: a rollout over the serving calls, sampled by a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashdreams.core.noise import KeyedNoise, Noise
from flashdreams.infra import rollout as stream
from flashdreams.infra.diffusion_model import VIDEO
from flashdreams.infra.rollout import ControlSource, Rollout, to_uint8
from flashdreams.rollout.plan import Plan
from flashdreams.rollout.recorder import record
from flashdreams.rollout.segment import Segment

if TYPE_CHECKING:
    from flashdreams.infra.pipeline import StreamInferencePipeline


def rollout(
    pipeline: StreamInferencePipeline,
    prompts: Sequence[str],
    plan: Plan,
    *,
    num_chunk: int,
    seed: int = 0,
    sample_ids: Sequence[str] | None = None,
    group_ids: Sequence[str] | None = None,
    noise: Noise | None = None,
    control: ControlSource = None,
    before: Callable[[Rollout, int], None] | None = None,
    on_chunk: Callable[[stream.Chunk], None] | None = None,
    **options: Any,
) -> Segment:
    """Roll out ``num_chunk`` chunks of a batch of prompts. Without gradient, whatever the trainer has switched on.

    Args:
        prompts: one per sample.
        seed, sample_ids: what the noise is drawn by; ids "0", "1", ... by default.
        group_ids: samples of one group begin every chunk with the same noise.
        noise: another source, which then stands for these three.
        control: see :meth:`StreamInferencePipeline.rollout`, as are ``options`` (``height``, ``conditions``, ...).
        before: called before each chunk with the rollout and the chunk's number, to steer it (``set_prompt``, ...).
        on_chunk: called with each chunk, frames and all. Without it nothing is decoded; :func:`decode` does so later.

    Raises:
        PlanError: the plan is for another setup of the pipeline.
    """
    if noise is None:
        ids = tuple(map(str, range(len(prompts)))) if sample_ids is None else tuple(sample_ids)
        noise = KeyedNoise(seed, ids, group_ids=None if group_ids is None else tuple(group_ids))
    with (
        torch.no_grad(),
        pipeline.rollout(list(prompts), num_chunk=num_chunk, noise=noise, control=control, **options) as run,
    ):
        recorder = record(run, plan, prompts=prompts)
        run.decodes = on_chunk is not None
        for index in range(num_chunk):
            if before is not None:
                before(run, index)
            chunk = next(run)
            if on_chunk is not None:
                on_chunk(chunk)
    return recorder.segment


@torch.no_grad()
def decode(pipeline: StreamInferencePipeline, segment: Segment) -> Tensor:
    """Frames of all chunks, uint8 ``[B, T, H, W, 3]``: those that streaming would have handed out."""
    if pipeline.decoder is None:
        raise ValueError(f"{pipeline.config.name} has no decoder; its latents are in the segment (chunk.clean)")
    cache, dtype = pipeline.decoder.initialize_cache(), getattr(torch, pipeline.decoder.config.dtype)
    clean = [chunk.clean[VIDEO].to(pipeline.device, dtype) for chunk in segment.chunks]
    return torch.cat([to_uint8(pipeline.decoder.decode(latent, cache, None)) for latent in clean], dim=1)
