"""Schedulers: the steps of one chunk, and the transition between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from flashdreams.config import ConfigError
from flashdreams.infra.scheduler import tables
from flashdreams.infra.scheduler.config import (
    BoundaryFewStepSchedulerConfig,
    DPMPPSchedulerConfig,
    FewStepSchedulerConfig,
    FlowMatchEulerSchedulerConfig,
    SchedulerConfig,
    UniPCSchedulerConfig,
)
from flashdreams.infra.scheduler.kernels import EULER, RENOISE, Kernel, add_noise
from flashdreams.infra.scheduler.multistep import SolverState


@dataclass(frozen=True)
class Step:
    """One denoising step: the network sees ``timestep``; ``kernel`` leads from ``sigma`` to ``sigma_next``."""

    index: int
    sigma: float
    sigma_next: float
    timestep: float
    kernel: Kernel = EULER


class Scheduler:
    """A table of steps and the kernel that moves between them. Holds no state of any rollout."""

    kernel: Kernel = EULER

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.steps = self._steps(config.num_steps)

    def sigmas(self, steps: int) -> Tensor:
        """Noise levels from at most 1 to a final 0, strictly falling, float32 ``[steps + 1]``."""
        raise NotImplementedError(type(self).__name__)

    def steps_of(self, *, first: bool) -> tuple[Step, ...]:
        """The steps of a chunk; ``first`` if it has no context yet."""
        return self.steps

    def timesteps(self, steps: int) -> Tensor:
        """What the network is told, float32 ``[steps]``: ``1000 * sigma``."""
        return 1000 * self.sigmas(steps)[:-1]

    def begin(self) -> Any:
        """State of a kernel that looks back over the steps of one chunk; made before the first. Most have none."""
        return None

    def transition(self, x: Tensor, flow: Tensor, step: Step, draw: Callable[[], Tensor], state: Any = None) -> Tensor:
        """Next sample, of ``x``'s shape.

        Args:
            draw: gives fresh standard noise where the kernel needs it.
            state: of this chunk, from :meth:`begin`.
        """
        mean = step.kernel.mean(x, flow, step.sigma, step.sigma_next, state)
        std = step.kernel.std(step.sigma, step.sigma_next)
        return mean + std * draw().to(mean) if std else mean

    def add_noise(self, clean: Tensor, noise: Tensor, sigma: float) -> Tensor:
        """``(1 - sigma) * clean + sigma * noise``."""
        return add_noise(clean, noise, sigma)

    def sample(
        self,
        x: Tensor,
        predict_flow: Callable[[Tensor, Step], Tensor],
        draw: Callable[[Step], Tensor],
        *,
        first: bool = False,
    ) -> Tensor:
        """Run all steps of a chunk from noise ``x``; ``predict_flow(x, step)`` is the model, ``draw(step)`` fresh
        noise, ``first`` that of :meth:`steps_of`."""
        state = self.begin()
        for step in self.steps_of(first=first):
            x = self.transition(x, predict_flow(x, step), step, lambda step=step: draw(step), state)
        return x

    def _steps(self, count: int) -> tuple[Step, ...]:
        return self._table(self.sigmas(count).tolist(), self.timesteps(count).tolist())

    def _table(self, sigmas: list[float], timesteps: list[float]) -> tuple[Step, ...]:
        count = len(timesteps)
        if any(a <= b for a, b in pairwise(sigmas)):
            raise ConfigError(
                f"{count} steps cannot be told apart in float32 with {self.config}; use fewer steps or a smaller shift"
            )
        return tuple(Step(i, sigmas[i], sigmas[i + 1], timesteps[i], self.kernel) for i in range(count))


class FlowMatchEulerScheduler(Scheduler):
    """Euler's method on the flow."""

    config: FlowMatchEulerSchedulerConfig

    def sigmas(self, steps: int) -> Tensor:
        table = tables.linear if self.config.table == "linear" else tables.diffusers_euler
        return torch.tensor(table(steps, self.config.shift), dtype=torch.float64).float()


class FewStepScheduler(Scheduler):
    """Predict the clean latent and re-noise it to the next distilled level."""

    config: FewStepSchedulerConfig
    kernel = RENOISE

    def __init__(self, config: FewStepSchedulerConfig) -> None:
        super().__init__(config)
        first = config.first_chunk_steps
        self.first_steps = (
            self.steps if first is None else self._table(self._levels(first).tolist(), self._told(first).tolist())
        )

    def steps_of(self, *, first: bool) -> tuple[Step, ...]:
        return self.first_steps if first else self.steps

    def sigmas(self, steps: int) -> Tensor:
        self._check(steps)
        return self._levels(self.config.denoising_steps)

    def timesteps(self, steps: int) -> Tensor:
        """The warped timesteps, or the distilled ones as they are."""
        self._check(steps)
        return self._told(self.config.denoising_steps)

    def _levels(self, denoising_steps: tuple[int, ...]) -> Tensor:
        if self.config.warp:
            levels = [t / 1000 for t in tables.warped_steps(denoising_steps, self.config.shift)]
        else:
            levels = [tables.nearest(t, self.config.shift) for t in denoising_steps]
        return torch.tensor([*levels, 0.0], dtype=torch.float64).float()

    def _told(self, denoising_steps: tuple[int, ...]) -> Tensor:
        if self.config.warp:
            return 1000 * self._levels(denoising_steps)[:-1]
        return torch.tensor(denoising_steps, dtype=torch.float32)

    def _check(self, steps: int) -> None:
        if steps != len(self.config.denoising_steps):
            raise ConfigError(f"{steps} steps were asked of a model distilled for {self.config.denoising_steps}")


class BoundaryFewStepScheduler(FewStepScheduler):
    """Above the boundary, predict the state there and re-noise it to the next level; below, work as
    :class:`FewStepScheduler` does, from the state that the last step above has handed on."""

    def __init__(self, config: BoundaryFewStepSchedulerConfig) -> None:
        self.lowest_above = config.boundary
        """Where the expert for high noise begins."""
        self.boundary = tables.nearest(1000 * config.boundary, config.shift)
        """The state it predicts: at the level of the training table that is nearest to that."""
        super().__init__(config)
        for steps in (self.steps, self.first_steps):
            if steps[-1].sigma >= config.boundary:
                raise ConfigError(
                    f"the last step of {self.config} is at noise level {steps[-1].sigma:.4g}, above the boundary "
                    f"{config.boundary}, so that no expert makes the clean latent; give a lower last step"
                )

    def _table(self, sigmas: list[float], timesteps: list[float]) -> tuple[Step, ...]:
        return tuple(
            self._above(step) if step.sigma >= self.lowest_above else step for step in super()._table(sigmas, timesteps)
        )

    def _above(self, step: Step) -> Step:
        # The last step above leads to the boundary, wherever below it the next one stands.
        sigma_next = step.sigma_next if step.sigma_next >= self.lowest_above else min(step.sigma_next, self.boundary)
        return replace(step, sigma_next=sigma_next, kernel=Kernel("boundary", boundary=self.boundary))


class MultistepScheduler(Scheduler):
    """A deterministic solver with a history, on a published table whose timesteps are cut off to whole numbers."""

    def begin(self) -> SolverState:
        return SolverState()

    def levels(self, steps: int) -> list[float]:
        """The table in float64, with its final 0."""
        raise NotImplementedError(type(self).__name__)

    def sigmas(self, steps: int) -> Tensor:
        return torch.tensor(self.levels(steps), dtype=torch.float64).float()

    def timesteps(self, steps: int) -> Tensor:
        """``1000 * sigma``, from the table before it is rounded to float32, cut off to whole numbers."""
        return (1000 * torch.tensor(self.levels(steps)[:-1], dtype=torch.float64)).trunc().float()


class UniPCScheduler(MultistepScheduler):
    """UniPC of order 2."""

    config: UniPCSchedulerConfig
    kernel = Kernel("unipc")

    def levels(self, steps: int) -> list[float]:
        table = tables.native_unipc if self.config.table == "native" else tables.diffusers_unipc
        return table(steps, self.config.shift)


class DPMPPScheduler(MultistepScheduler):
    """DPM-Solver++(2M)."""

    config: DPMPPSchedulerConfig
    kernel = Kernel("dpmpp")

    def levels(self, steps: int) -> list[float]:
        return tables.native_dpmpp(steps, self.config.shift)
