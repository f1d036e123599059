"""A plan: everything that decides how a rollout samples, as one value that is pinned before it and kept with it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from flashdreams.config import ConfigError
from flashdreams.infra.loading import expert_configs
from flashdreams.infra.scheduler.samplers import Step
from flashdreams.infra.scheduler.transitions import Kernel, Score

if TYPE_CHECKING:
    from flashdreams.infra.pipeline import StreamInferencePipeline

StorageDType = Literal["float64", "float32", "bfloat16", "float16"]


class PlanError(ValueError):
    """A plan cannot be run here, or is not what was run. The message names the values, and what to do."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a rollout samples. :func:`plan_for` makes one of a pipeline; segments and records hold its ``digest``."""

    model: str
    steps: tuple[Step, ...]
    """Of a chunk, with the kernels of serving."""
    first_steps: tuple[Step, ...] | None = None
    """Of a chunk without context, where the model takes others."""
    sde: Kernel | None = None
    """Takes the place of the model's own kernel at the stochastic steps; ``None``: nowhere."""
    stochastic: tuple[tuple[int, ...], ...] = ()
    """Numbers of those steps in chunk 0, chunk 1, ...; the last entry stands for all chunks after it."""
    storage_dtype: StorageDType = "float32"
    """What samples are rounded to between steps, so that a record in it holds exactly what was sampled."""
    score: Score = "gaussian"
    len_t: int
    first_len_t: int
    window_size_t: int | None
    sink_size_t: int
    rope: str
    context_noise: float
    recache_sink: bool
    dtype: str
    guidance_scale: tuple[float, ...]
    """Of each expert, that of the highest noise first."""
    boundaries: tuple[float, ...]
    """Noise levels at which experts change, falling."""
    approximations: tuple[str, ...]
    """What makes the numbers other than the published model's (eight-bit weights or keys and values)."""

    def __post_init__(self) -> None:
        if not self.steps:
            raise ConfigError("this plan has no sigmas; make it with plan_for(pipeline, ...), or give steps")
        for name, allowed in (("storage_dtype", StorageDType), ("score", Score)):
            if getattr(self, name) not in get_args(allowed):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; expected {', '.join(get_args(allowed))}")
        if bool(self.stochastic) != (self.sde is not None):
            raise ConfigError("sde is the kernel of the stochastic steps; give both, or neither")
        longest = max(len(self.steps), len(self.first_steps or ()))
        for step in {step for each in self.stochastic for step in each}:
            if not 0 <= step < longest:
                raise ConfigError(f"stochastic step {step} is none of the {longest} steps of a chunk, from 0")
        for steps in (self.steps, self.first_steps or ()):
            for i, step in enumerate(steps):
                if step.index != i or not 0 <= step.sigma_next < step.sigma <= 1:
                    raise ConfigError(
                        f"step {i} has index {step.index} and goes from sigma {step.sigma} to {step.sigma_next}; "
                        "expected its own number, and levels that fall within [0, 1]"
                    )

    @property
    def digest(self) -> str:
        """sha256 of all of it."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()

    @property
    def dtype_of_storage(self) -> torch.dtype:
        return getattr(torch, self.storage_dtype)

    def to_dict(self) -> dict[str, Any]:
        """As plain data that JSON can hold."""
        return json.loads(json.dumps(asdict(self)))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Plan:
        """The plan of :meth:`to_dict`.

        Raises:
            ConfigError: a field is missing, unknown or out of range.
        """
        known, given = {field.name for field in fields(cls)}, dict(values)
        if unknown := sorted(given.keys() - known):
            raise ConfigError(f"a plan has no {', '.join(unknown)}; was it written by another version?")
        if "steps" not in given:
            raise ConfigError("this plan has no sigmas; make it with plan_for(pipeline, ...), or give steps")
        for name in ("steps", "first_steps"):
            if given.get(name) is not None:
                given[name] = tuple(map(_step, given[name]))
        if given.get("sde") is not None:
            given["sde"] = Kernel.from_dict(given["sde"])
        given["stochastic"] = tuple(tuple(each) for each in given.get("stochastic", ()))
        for name in ("guidance_scale", "boundaries", "approximations"):
            given[name] = tuple(given.get(name, ()))
        try:
            return cls(**given)
        except TypeError as error:
            raise ConfigError(f"this plan is not whole: {error}") from None

    def steps_of(self, chunk: int, *, first: bool) -> tuple[Step, ...]:
        """The steps of ``chunk`` with the kernels they take in it; ``first`` if it has no context yet."""
        steps = self.first_steps if first and self.first_steps else self.steps
        if self.sde is None:
            return steps
        stochastic = self.stochastic[min(chunk, len(self.stochastic) - 1)]
        return tuple(replace(step, kernel=self.sde) if step.index in stochastic else step for step in steps)

    def visible(self, stop: int, origin: int = 0) -> int:
        """Latent frames in sight of a chunk that ends before frame ``stop``, its own included, where the context began
        at ``origin``."""
        return stop - origin if self.window_size_t is None else min(stop - origin, self.window_size_t)

    def check(self, pipeline: StreamInferencePipeline) -> None:
        """Raise :class:`PlanError` unless ``pipeline`` is set up as the plan says."""
        here = _facts(pipeline)
        differs = [
            f"{name} ({getattr(self, name)}, here {here[name]})" for name in here if getattr(self, name) != here[name]
        ]
        if differs:
            raise PlanError(f"the plan is for another setup: {', '.join(differs)}; make one with plan_for(pipeline)")


def plan_for(
    pipeline: StreamInferencePipeline,
    *,
    sigmas: Sequence[float] | None = None,
    sde: Kernel | None = None,
    stochastic: Sequence[int] | Sequence[Sequence[int]] | None = None,
    storage_dtype: StorageDType = "float32",
    score: Score = "gaussian",
) -> Plan:
    """The plan of ``pipeline``: by default what it does in serving.

    Args:
        sigmas: noise levels from at most 1 to a final 0, ``[T + 1]``, instead of the model's own.
        sde: kernel of the stochastic steps. A few-step model draws noise at each step but the last by its own kernel,
            ``cps`` with eta 1, and needs none.
        stochastic: numbers of the steps that take ``sde``, for all chunks or per chunk (the last entry then stands for
            the rest); all by default. :mod:`flashdreams.rollout.schedules` draws them.
        storage_dtype: what samples are rounded to between steps.

    Raises:
        ConfigError: sigmas do not fall from at most 1 to 0, or a step is none.
    """
    scheduler = pipeline.diffusion_model.scheduler
    steps, first = (scheduler.steps_of(first=first) for first in (False, True))
    if sigmas is not None:
        steps = first = _along(sigmas, steps)
    rows: tuple[tuple[int, ...], ...] = ()
    if sde is not None:
        given: Any = range(len(steps)) if stochastic is None else list(stochastic)
        nested = bool(given) and not isinstance(given[0], int)
        rows = tuple(tuple(sorted(set(map(int, row)))) for row in (given if nested else [given]))
    elif stochastic is not None:
        raise ConfigError("stochastic steps need a kernel to draw with; give sde, such as Kernel('flow_sde', eta=0.7)")
    facts: dict[str, Any] = _facts(pipeline)
    return Plan(
        steps=steps, first_steps=None if first == steps else first, sde=sde, stochastic=rows,
        storage_dtype=storage_dtype, score=score, **facts,
    )  # fmt: skip


def _step(values: Mapping[str, Any]) -> Step:
    numbers = dict(values)
    return Step(kernel=Kernel.from_dict(numbers.pop("kernel")), **numbers)


def _along(sigmas: Sequence[float], own: tuple[Step, ...]) -> tuple[Step, ...]:
    """Steps along given noise levels with the kernel of the model's ``own``."""
    levels = torch.tensor(list(sigmas), dtype=torch.float32)
    numbers, timesteps = levels.tolist(), (1000 * levels[:-1]).tolist()
    if len(numbers) < 2 or numbers[-1] != 0 or numbers[0] > 1 or any(a <= b for a, b in pairwise(numbers)):
        raise ConfigError(f"sigmas are {list(sigmas)}; expected them to fall from at most 1 to a final 0")
    if len({step.kernel for step in own}) > 1:
        raise ConfigError("this model's experts meet at levels of its own table; leave sigmas out")
    return tuple(Step(i, numbers[i], numbers[i + 1], timesteps[i], own[0].kernel) for i in range(len(timesteps)))


def check_sigmas(asked: Sequence[float], ran: Sequence[float]) -> None:
    """Compare the noise levels that were asked for with those that a worker says it ran.

    Raises:
        PlanError: they differ by more than 1e-5 absolute and 1e-4 relative, are of another number, or none came back.
    """
    if not len(ran):
        raise PlanError("no sigmas came back from what ran; without them nobody knows what was sampled")
    if len(asked) != len(ran):
        raise PlanError(f"{len(ran)} sigmas were run ({list(ran)}); the plan has {len(asked)} ({list(asked)})")
    for i, (want, got) in enumerate(zip(asked, ran, strict=True)):
        if not abs(want - got) <= 1e-5 + 1e-4 * abs(want):
            raise PlanError(f"sigma {i} was {got} where it ran; the plan has {want}")


def _facts(pipeline: StreamInferencePipeline) -> dict[str, Any]:
    """What of a plan the pipeline's setup decides."""
    model = pipeline.diffusion_model
    transformer = model.config.transformer
    return {
        "model": pipeline.config.name,
        "len_t": transformer.len_t,
        "first_len_t": transformer.len_t if transformer.first_len_t is None else transformer.first_len_t,
        "window_size_t": transformer.window_size_t,
        "sink_size_t": transformer.sink_size_t,
        "rope": transformer.rope,
        "context_noise": float(transformer.context_noise),
        "recache_sink": transformer.recache_sink,
        "dtype": transformer.dtype,
        "guidance_scale": tuple(float(expert.guidance_scale) for expert in expert_configs(model.config)),
        "boundaries": tuple(model.boundaries),
        "approximations": tuple(pipeline.acceleration.approximations) if pipeline.acceleration else (),
    }
