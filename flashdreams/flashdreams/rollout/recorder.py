"""What samples a rollout by a plan, and keeps what it did."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashdreams.core.controls import Control, control_to_json
from flashdreams.core.noise import KeyedNoise
from flashdreams.infra import rollout as infra_rollout
from flashdreams.infra.cache import PipelineCache
from flashdreams.infra.diffusion_model import VIDEO
from flashdreams.infra.rollout import Rollout
from flashdreams.infra.scheduler.multistep import SolverState
from flashdreams.infra.scheduler.samplers import Step
from flashdreams.infra.scheduler.transitions import transition
from flashdreams.rollout.plan import Plan, check_sigmas
from flashdreams.rollout.segment import Chunk, Event, Segment

if TYPE_CHECKING:
    from flashdreams.infra.pipeline import StreamInferencePipeline


class PlanScheduler:
    """The steps of one chunk as the plan has them, in the place of the model's scheduler."""

    def __init__(self, plan: Plan, chunk: int, mask: Tensor | None) -> None:
        self.plan = plan
        self.chunk = chunk
        self.mask = mask
        self.ran: list[Step] = []
        self.samples: list[Tensor] = []
        """In the storage dtype, by position; one more than steps at the end."""
        self.log_probs: dict[int, Tensor] = {}

    def begin(self) -> SolverState:
        """History for kernels that look back."""
        return SolverState()

    def steps_of(self, *, first: bool) -> tuple[Step, ...]:
        """The steps of this chunk; ``first`` if it has no context yet."""
        return self.plan.steps_of(self.chunk, first=first)

    def transition(self, x: Tensor, flow: Tensor, step: Step, draw: Callable[[], Tensor], state: SolverState) -> Tensor:
        """Draw the next sample, score it, and keep both ends where it was drawn."""
        storage = self.plan.dtype_of_storage
        std = step.kernel.std(step.sigma, step.sigma_next)
        done = transition(
            step.kernel, x, flow, step.sigma, step.sigma_next, noise=draw().to(x) if std else None,
            storage_dtype=storage, score=self.plan.score, mask=self.mask, state=state,
        )  # fmt: skip
        if not self.ran:
            self.samples.append(x.to(storage))
        self.ran.append(step)
        self.samples.append(done.next.to(storage))
        if done.log_prob is not None:
            self.log_probs[step.index] = done.log_prob
        return done.next


class Recorder:
    """Samples ``rollout`` by ``plan`` from its first chunk on, and keeps a :class:`Segment` of it.

    Attach it before the first chunk with :func:`record`. The rollout is driven as always, and may be steered.
    """

    def __init__(self, pipeline: StreamInferencePipeline, cache: PipelineCache, plan: Plan, **about: Any) -> None:
        plan.check(pipeline)
        if cache.autoregressive_index or cache.pending:
            raise ValueError(
                f"this rollout stands at chunk {cache.autoregressive_index}; a record begins with the first"
            )
        if pipeline.config.encoder is not None and pipeline.config.encoder.takes.pixels:
            raise ValueError(f"controls of {pipeline.config.name} are pixels, which a segment does not hold")
        self.pipeline, self.plan = pipeline, plan
        self._scheduler: PlanScheduler | None = None
        self._events: list[Event] = []
        noise, compression = cache.noise, pipeline.decoder.spatial_compression if pipeline.decoder else 1
        keyed = isinstance(noise, KeyedNoise)
        self.segment = Segment(
            plan=plan, digest=plan.digest,
            height=cache.layout.height * compression, width=cache.layout.width * compression, frames=cache.layout.plan,
            conditions=dict(cache.conditions.to_dict()), chunks=[], loras=dict(cache.loras),
            seed=noise.seed if keyed else None,
            sample_ids=list(noise.sample_ids) if keyed else None,
            group_ids=list(noise.group_ids) if keyed and noise.group_ids else None,
            **about,
        )  # fmt: skip
        """What was made so far."""

    def begin(self, chunk: int, x: Tensor, stamp: Callable[[Tensor], Tensor]) -> tuple[Tensor, PlanScheduler]:
        """See :class:`~flashdreams.infra.cache.Driver`."""
        x = x.to(self.plan.dtype_of_storage).to(x.dtype)
        self._scheduler = PlanScheduler(self.plan, chunk, new_elements(x, stamp))
        return x, self._scheduler

    def prompted(self, cache: PipelineCache, prompts: Sequence[str], policy: str) -> None:
        """See :class:`~flashdreams.infra.rollout.Observer`."""
        self._events.append(Event("prompt", policy, list(prompts), dict(cache.conditions.to_dict())))

    def set_loras(self, cache: PipelineCache) -> None:
        """See :class:`~flashdreams.infra.rollout.Observer`."""
        self._events.append(Event("loras", loras=dict(cache.loras)))

    def made(
        self, cache: PipelineCache, chunk: infra_rollout.Chunk, controls: Sequence[Sequence[Control | None]]
    ) -> None:
        """See :class:`~flashdreams.infra.rollout.Observer`."""
        start, stop = cache.layout.plan.span(chunk.index)
        record = Chunk(
            chunk.index, start, {VIDEO: chunk.latent},
            [[control_to_json(control) for control in row] for row in controls],
            kv_length=self.plan.visible(stop, cache.origin), weight_version=cache.weight_version,
            loras=dict(cache.loras), events=self._events,
        )  # fmt: skip
        scheduler, self._events, self._scheduler = self._scheduler, [], None
        if scheduler is not None:
            self._keep(record, scheduler, first=start == cache.origin)
        self.segment.chunks.append(record)

    def _keep(self, record: Chunk, scheduler: PlanScheduler, *, first: bool) -> None:
        record.sigmas = sigmas_of(scheduler.ran)
        check_sigmas(sigmas_of(self.plan.steps_of(record.index, first=first)), record.sigmas)
        record.mask = scheduler.mask
        record.steps = tuple(scheduler.log_probs)
        if not record.steps:
            return
        record.log_probs = torch.stack(list(scheduler.log_probs.values()), dim=1)
        record.positions = tuple(sorted({place for step in record.steps for place in (step, step + 1)}))
        record.states = {VIDEO: torch.stack([scheduler.samples[place] for place in record.positions], dim=1)}


def record(rollout: Rollout, plan: Plan, *, prompts: Sequence[str] | None = None) -> Recorder:
    """Sample ``rollout``, which has made no chunk yet, by ``plan`` and keep what it does: ``record(...).segment``.

    Raises:
        PlanError: the plan is for another setup of the pipeline.
        ValueError: chunks were made already, or its controls are pixels.
    """
    recorder = Recorder(rollout.pipeline, rollout.cache, plan, prompts=None if prompts is None else list(prompts))
    rollout.cache.driver = rollout.observer = recorder
    return recorder


def new_elements(x: Tensor, stamp: Callable[[Tensor], Tensor]) -> Tensor | None:
    """Which frames of a sample like ``x`` are not put in by ``stamp``: bool ``[B, 1, T, 1, 1]``; ``None``: all."""
    made = stamp(torch.zeros_like(x)) != stamp(torch.ones_like(x))
    return None if bool(made.all()) else made[:, :1, :, :1, :1]


def sigmas_of(steps: Sequence[Step]) -> tuple[float, ...]:
    """Noise levels ``[T + 1]`` of the steps of a chunk."""
    return tuple(step.sigma for step in steps) + tuple(step.sigma_next for step in steps[-1:])
