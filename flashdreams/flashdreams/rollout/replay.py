"""Score a segment again: the log-probability of each step that drew noise, under the present weights.

``exact`` makes the context again with the serving calls, at the same shapes; under the weights that made the segment,
every log-probability is equal to the recorded one. ``packed`` is one forward pass over clean chunks and noisy copies,
equal to 1e-5 in float32, and quicker where a device has room for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from flashdreams.infra.scheduler.samplers import Step
from flashdreams.infra.scheduler.transitions import Transition, transition
from flashdreams.rollout.checks import Weights, check_segment
from flashdreams.rollout.flows import Mode, Query, flows
from flashdreams.rollout.segment import Chunk, Segment

if TYPE_CHECKING:
    from flashdreams.infra.pipeline import StreamInferencePipeline

Entry = tuple[int, int]
"""A chunk's index and a step's number."""


@dataclass
class Scored:
    """One step, scored. ``mean`` and ``velocity`` are ``[B, C, T, H, W]`` in at least float32, ``log_prob`` ``[B]``."""

    chunk: int
    step: int
    log_prob: Tensor
    mean: Tensor
    std: float
    velocity: Tensor


@dataclass
class ReplayResult:
    """Scores of ``entries``, in their order."""

    entries: list[Entry]
    log_probs: Tensor
    """``[B, len(entries)]``; each the mean over the chunk's active elements."""
    means: list[Tensor]
    """Of the transitions, ``[B, C, T, H, W]`` each."""
    stds: list[float]
    velocities: list[Tensor]


def replay(
    pipeline: StreamInferencePipeline,
    segment: Segment,
    select: Sequence[Entry] | None = None,
    *,
    mode: Mode = "exact",
    context_grad: Literal["detached", "full"] = "detached",
    weights: Weights = "recorded",
) -> ReplayResult:
    """Log-probabilities of ``segment`` under the present weights, with a gradient where gradients are on and weights
    ask for one. One call of ``backward`` on the whole result; :func:`replay_each` needs memory for a single step.

    Args:
        select: (chunk, step) pairs; every step that drew noise by default.
        mode: ``exact`` or ``packed``.
        context_grad: whether the gradient also goes through the context that a chunk sees (``full``).
        weights: ``recorded`` refuses weights other than those the segment was made with; ``any`` does not.

    Raises:
        PlanError: the plan, the noise levels, the context's length or the weights are not those of the segment.
        KeyError: a selected step drew no noise.
        ValueError: ``packed`` cannot be equal for this model or segment, with the reason.
    """
    entries = segment.scored if select is None else [(int(chunk), int(step)) for chunk, step in select]
    order = sorted(set(entries))
    each = replay_each(pipeline, segment, order, mode=mode, context_grad=context_grad, weights=weights)
    found = {(scored.chunk, scored.step): scored for scored in each}
    results = [found[entry] for entry in entries]
    return ReplayResult(
        entries,
        torch.stack([scored.log_prob for scored in results], dim=1) if results else segment.log_probs([]),
        [scored.mean for scored in results],
        [scored.std for scored in results],
        [scored.velocity for scored in results],
    )


def replay_each(
    pipeline: StreamInferencePipeline,
    segment: Segment,
    select: Sequence[Entry] | None = None,
    *,
    mode: Mode = "exact",
    context_grad: Literal["detached", "full"] = "detached",
    weights: Weights = "recorded",
) -> Iterator[Scored]:
    """The same, step by step in rising order. With a detached context, each step has a graph of its own, so that
    ``backward`` can follow each before the next is computed."""
    order = sorted(set(segment.scored if select is None else select))
    check_segment(pipeline, segment, weights)
    steps = [_step_of(segment, *entry) for entry in order]
    queries = [
        Query(chunk.index, _wide(chunk.state(step.index), pipeline), _filled(segment, step.timestep), step.sigma)
        for chunk, step in steps
    ]
    flow = flows(pipeline, segment, queries, mode=mode, context_grad=context_grad)
    for (chunk, step), query in zip(steps, queries, strict=True):
        velocity = next(flow)
        done = _score(segment, chunk, step, query.x, velocity)
        assert done.log_prob is not None
        yield Scored(chunk.index, step.index, done.log_prob, done.mean, float(done.std), velocity)


def _score(segment: Segment, chunk: Chunk, step: Step, x: Tensor, velocity: Tensor) -> Transition:
    mask = None if chunk.mask is None else chunk.mask.to(x.device)
    return transition(
        step.kernel, x, velocity, step.sigma, step.sigma_next, next=chunk.state(step.index + 1).to(x),
        storage_dtype=segment.plan.dtype_of_storage, score=segment.plan.score, mask=mask,
    )  # fmt: skip


def _step_of(segment: Segment, index: int, number: int) -> tuple[Chunk, Step]:
    segment.log_probs([(index, number)])  # an error if it drew no noise
    chunk = segment.chunks[index]
    return chunk, segment.plan.steps_of(index, first=chunk.start == segment.origin(index))[number]


def _wide(x: Tensor, pipeline: StreamInferencePipeline) -> Tensor:
    """As the loop has it: in at least float32, on the device."""
    weights = next(pipeline.diffusion_model.parameters()).dtype
    return x.to(pipeline.device, torch.promote_types(weights, torch.float32))


def _filled(segment: Segment, timestep: float) -> Tensor:
    return torch.full((segment.batch_size,), timestep, dtype=torch.float32)
