"""Flows of a model within the context of a segment: what replay and forward-process training are made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from flashdreams.rollout.checks import Weights, check_segment
from flashdreams.rollout.context import Context
from flashdreams.rollout.packed import packed_flows
from flashdreams.rollout.segment import Segment

if TYPE_CHECKING:
    from flashdreams.infra.pipeline import StreamInferencePipeline

Mode = Literal["exact", "packed"]


@dataclass(frozen=True)
class Query:
    """A sample ``[B, C, T, H, W]`` of a chunk, what the network is told of its noise (``timestep`` ``[B]``), and the
    level that says which expert is asked."""

    chunk: int
    x: Tensor
    timestep: Tensor
    sigma: float


def flows(
    pipeline: StreamInferencePipeline,
    segment: Segment,
    queries: Sequence[Query],
    *,
    mode: Mode = "exact",
    context_grad: Literal["detached", "full"] = "detached",
) -> Iterator[Tensor]:
    """The flow of each query, whose chunks must rise, in the context of the segment's clean chunks before it."""
    if mode not in ("exact", "packed"):
        raise ValueError(f"mode is {mode!r}; expected exact or packed")
    if context_grad not in ("detached", "full"):
        raise ValueError(f"context_grad is {context_grad!r}; expected detached or full")
    wanted = torch.is_grad_enabled() and any(p.requires_grad for p in pipeline.diffusion_model.parameters())
    if mode == "packed":
        yield from packed_flows(pipeline, segment, queries, detached=wanted and context_grad == "detached")
        return
    context = Context(pipeline, segment, context_grad if wanted else "none")
    last = max((query.chunk for query in queries), default=-1)
    for chunk in segment.chunks[: last + 1]:
        context.enter(chunk)
        for query in queries:
            if query.chunk == chunk.index:
                yield context.flow(query.x, query.timestep.to(query.x.device), query.sigma)
        if chunk.index < last:
            context.commit(chunk)


def predict_noise_at_step(
    pipeline: StreamInferencePipeline,
    segment: Segment,
    samples: Sequence[Tensor],
    sigma: Tensor,
    *,
    chunks: Sequence[int] | None = None,
    mode: Mode = "exact",
    context_grad: Literal["detached", "full"] = "detached",
    weights: Weights = "any",
) -> list[Tensor]:
    """Flow ``noise - clean`` of noised chunks, each seeing the segment's own clean chunks before it: for training by
    the forward process (DiffusionNFT, supervised).

    Args:
        samples: ``(1 - sigma) * clean + sigma * noise`` of each chunk, ``[B, C, T, H, W]``.
        sigma: noise levels in (0, 1], ``[B]`` for all chunks or ``[B, N]``.
        chunks: numbers of the chunks, rising; all by default.

    Raises:
        ValueError: samples, sigma and chunks are of different numbers, a level is outside (0, 1], or the samples of a
            chunk would go to several experts at once.
    """
    numbers = [chunk.index for chunk in segment.chunks] if chunks is None else list(chunks)
    batch = segment.batch_size
    levels = sigma[:, None].expand(-1, len(numbers)) if sigma.ndim == 1 else sigma
    if tuple(levels.shape) != (batch, len(numbers)) or len(samples) != len(numbers):
        raise ValueError(
            f"{len(samples)} latents and sigma {list(sigma.shape)} were given for {len(numbers)} chunks of a batch of "
            f"{batch}; expected a latent per chunk, and sigma [{batch}] or [{batch}, {len(numbers)}]"
        )
    if numbers != sorted(set(numbers)) or not all(0 <= number < len(segment.chunks) for number in numbers):
        raise ValueError(f"chunks are {numbers}; expected rising numbers of the {len(segment.chunks)} there are")
    if not bool(((levels > 0) & (levels <= 1)).all()):
        raise ValueError(f"sigma goes from {float(levels.min())} to {float(levels.max())}; expected levels in (0, 1]")
    check_segment(pipeline, segment, weights)
    model, queries = pipeline.diffusion_model, []
    for i, (number, x) in enumerate(zip(numbers, samples, strict=True)):
        own = levels[:, i].float()
        experts = {model.expert_index(level) for level in own.tolist()}
        if len(experts) > 1:
            raise ValueError(f"sigmas {own.tolist()} belong to several experts; draw those of a chunk on one side")
        queries.append(Query(number, x, 1000 * own, own[0].item()))
    return list(flows(pipeline, segment, queries, mode=mode, context_grad=context_grad))
