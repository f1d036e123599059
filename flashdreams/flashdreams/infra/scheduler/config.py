"""Configs of the samplers (torch-free)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from flashdreams.config import ConfigError
from flashdreams.infra.config import SchedulerConfig


def check_shift(shift: float) -> None:
    """Raise ConfigError unless ``shift`` is a finite positive number."""
    if not (math.isfinite(shift) and shift > 0):
        raise ConfigError(f"shift is {shift}; expected a finite number above 0")


@dataclass(frozen=True, kw_only=True)
class FlowMatchEulerSchedulerConfig(SchedulerConfig):
    """Deterministic Euler steps along the flow."""

    _target: ClassVar[str] = "flashdreams.infra.scheduler.samplers:FlowMatchEulerScheduler"
    shift: float = 5.0
    table: Literal["linear", "diffusers"] = "linear"
    """``linear``: N even steps from 1 to 0, shifted. ``diffusers``: the table of its FlowMatchEulerDiscreteScheduler,
    which starts at 1, ends at an already shifted 1/1000, and shifts again."""

    def validate(self) -> None:
        super().validate()
        check_shift(self.shift)


@dataclass(frozen=True, kw_only=True)
class UniPCSchedulerConfig(SchedulerConfig):
    """Second-order predictor-corrector (UniPC, "bh2") on clean estimates. The network is told whole timesteps."""

    _target: ClassVar[str] = "flashdreams.infra.scheduler.samplers:UniPCScheduler"
    num_steps: int = 50
    shift: float = 5.0
    table: Literal["native", "diffusers"] = "native"
    """``native``: Wan's own, from 0.999 before the shift. ``diffusers``: of its UniPCMultistepScheduler, from 1."""

    def validate(self) -> None:
        super().validate()
        check_shift(self.shift)


@dataclass(frozen=True, kw_only=True)
class DPMPPSchedulerConfig(SchedulerConfig):
    """DPM-Solver++(2M), midpoint, on clean estimates, with Wan's table. The network is told whole timesteps."""

    _target: ClassVar[str] = "flashdreams.infra.scheduler.samplers:DPMPPScheduler"
    num_steps: int = 50
    shift: float = 5.0

    def validate(self) -> None:
        super().validate()
        check_shift(self.shift)


@dataclass(frozen=True, kw_only=True)
class FewStepSchedulerConfig(SchedulerConfig):
    """Predict the clean latent, re-noise to the next level: the sampler of distilled models (Self-Forcing)."""

    _target: ClassVar[str] = "flashdreams.infra.scheduler.samplers:FewStepScheduler"
    num_steps: int = 4
    shift: float = 5.0
    denoising_steps: tuple[int, ...] = (1000, 750, 500, 250)
    """Training steps, of 1000, at which the model was distilled, falling."""
    warp: bool = True
    """Take them as indices into the shifted table (1000, 937.5, 833.3, 625 at shift 5) instead of as timesteps."""
    first_chunk_steps: tuple[int, ...] | None = None
    """Steps of a chunk that has no context yet, where it takes others: more of them (Causal-Forcing++)."""

    def validate(self) -> None:
        super().validate()
        check_shift(self.shift)
        steps = self.denoising_steps
        if self.num_steps != len(steps):
            raise ConfigError(
                f"num_steps is {self.num_steps}, but this model was distilled for {len(steps)} steps {steps}; "
                f"use num_steps {len(steps)} or give as many denoising_steps"
            )
        for name in ("denoising_steps", "first_chunk_steps"):
            steps = getattr(self, name)
            if steps is None:
                continue
            if not steps or list(steps) != sorted(set(steps), reverse=True) or not 1 <= steps[-1] <= steps[0] <= 1000:
                raise ConfigError(f"{name} are {steps}; expected falling whole numbers from 1000 to 1")


@dataclass(frozen=True, kw_only=True)
class BoundaryFewStepSchedulerConfig(FewStepSchedulerConfig):
    """The few-step sampler of two experts (FastVideo's causal Wan2.2): the one for high noise predicts the state at the
    boundary between them, not the clean latent, and is re-noised from there."""

    _target: ClassVar[str] = "flashdreams.infra.scheduler.samplers:BoundaryFewStepScheduler"
    num_steps: int = 8
    shift: float = 12.0
    denoising_steps: tuple[int, ...] = (1000, 850, 700, 550, 350, 275, 200, 125)
    boundary: float = 0.875
    """Noise level at which the experts meet; the same as the high-noise expert's ``sigma_low``."""

    def validate(self) -> None:
        super().validate()
        if not 0 < self.boundary < 1:
            raise ConfigError(f"boundary is {self.boundary}; expected a noise level between 0 and 1")


@dataclass(frozen=True, kw_only=True)
class IndexedFewStepSchedulerConfig(SchedulerConfig):
    """Predict the clean latent, re-noise to the next level, at entries of the table that :class:`UniPCSchedulerConfig`
    has for 1000 steps. The network is told whole timesteps, and levels are found again by them."""

    _target: ClassVar[str] = "flashdreams.infra.scheduler.indexed:IndexedFewStepScheduler"
    num_steps: int = 4
    shift: float = 10.0
    indices: tuple[int, ...] = (0, 250, 500, 750)
    """Entries of the table at which the model was distilled, rising from 0, the highest level, to at most 999."""

    def validate(self) -> None:
        super().validate()
        check_shift(self.shift)
        indices = self.indices
        if not indices or list(indices) != sorted(set(indices)) or not 0 <= indices[0] <= indices[-1] <= 999:
            raise ConfigError(f"indices are {indices}; expected rising whole numbers from 0 to 999")
        if self.num_steps != len(indices):
            raise ConfigError(
                f"num_steps is {self.num_steps}, but this model was distilled for the {len(indices)} steps at "
                f"{indices}; use num_steps {len(indices)} or give as many indices"
            )


def with_solver(config: SchedulerConfig, solver: Literal["unipc", "dpm++", "euler"]) -> SchedulerConfig:
    """A scheduler of another kind with the steps and the shift of ``config``.

    Raises:
        ConfigError: the model was distilled for steps of its own.
    """
    if isinstance(config, (FewStepSchedulerConfig, IndexedFewStepSchedulerConfig)):
        raise ConfigError(f"this model was distilled for its own few steps and takes no other solver ({solver})")
    shift = getattr(config, "shift", 1.0)
    if solver == "euler":
        return FlowMatchEulerSchedulerConfig(num_steps=config.num_steps, shift=shift, table="diffusers")
    other = UniPCSchedulerConfig if solver == "unipc" else DPMPPSchedulerConfig
    return other(num_steps=config.num_steps, shift=shift)
