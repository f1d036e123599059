"""Meet every shape of a rollout before it starts, so that nothing is compiled while frames are awaited."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from flashdreams.infra.diffusion_model import DiffusionModel
from flashdreams.infra.pipeline import StreamInferencePipeline
from flashdreams.infra.rollout import Rollout
from flashdreams.infra.scheduler.samplers import Step

DECODER_SHAPES = 4
"""A causal decoder remembers nothing at first, then one frame, then two; its shapes are steady by the fourth latent."""


@dataclass
class _Glance:
    """A scheduler that asks each expert once and leaves the sample as it is; twice where the first pass of a chunk
    commits the one before it, and so is not like the rest."""

    scheduler: Any
    model: DiffusionModel

    def begin(self) -> Any:
        return self.scheduler.begin()

    def steps_of(self, *, first: bool) -> tuple[Step, ...]:
        last_by_expert = {self.model.expert_index(step.sigma): step for step in self.scheduler.steps_of(first=first)}
        return tuple(last_by_expert.values()) * (1 + self.model.config.fused_commit)

    def transition(self, x: Tensor, *_: Any) -> Tensor:
        return x


def prewarm(pipeline: StreamInferencePipeline, start: Callable[[], Rollout], chunks: int | None = None) -> int:
    """Run the first chunks of a rollout, with one step for each expert, until the window and the decoder are full.

    Nothing else may use the pipeline meanwhile.

    Args:
        start: makes the rollout, as the ones to come will be made; it ends earlier if that is shorter.
        chunks: how many to run at most; ``None``: as many as bring new shapes.

    Returns:
        How many chunks were run.
    """
    model: Any = pipeline.diffusion_model
    own, chunks = model.scheduler, chunks_until_steady(pipeline) if chunks is None else chunks
    model.scheduler = _Glance(own, model)
    try:
        with start() as rollout:
            made = sum(1 for _ in zip(range(chunks), rollout, strict=False))
            rollout.flush()
    finally:
        model.scheduler = own
    return made


def chunks_until_steady(pipeline: StreamInferencePipeline) -> int:
    """Chunks after which no new shape comes."""
    transformer = pipeline.config.diffusion_model.transformer
    if transformer.bidirectional or transformer.window_size_t is None:
        return 1
    fill = math.ceil(transformer.window_size_t / transformer.len_t) + 1  # a sink or a first chunk may shift the grid
    decoder = DECODER_SHAPES if pipeline.decoder is not None and pipeline.decoder.compiled_parts else 1
    return max(fill, decoder)
