"""Schedulers: the steps of one chunk, and the transition between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from flashdreams.config import ConfigError
from flashdreams.infra.scheduler import kernels, tables
from flashdreams.infra.scheduler.config import (
    DPMPPSchedulerConfig,
    FewStepSchedulerConfig,
    FlowMatchEulerSchedulerConfig,
    SchedulerConfig,
    UniPCSchedulerConfig,
)
from flashdreams.infra.scheduler.multistep import SolverState, dpmpp_step, unipc_step


@dataclass(frozen=True)
class Step:
    """One denoising step: the network sees ``timestep``; the transition goes from ``sigma`` to ``sigma_next``."""

    index: int
    sigma: float
    sigma_next: float
    timestep: float
    eta: float = 0.0


class Scheduler:
    """A table of steps and the kernel that moves between them. Holds no state of any rollout."""

    eta: float = 0.0

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.steps = self._steps(config.num_steps)

    def sigmas(self, steps: int) -> Tensor:
        """Noise levels from at most 1 to a final 0, strictly falling, float32 ``[steps + 1]``."""
        raise NotImplementedError(type(self).__name__)

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
        return kernels.transition(x, flow, step.sigma, step.sigma_next, step.eta, draw)

    def add_noise(self, clean: Tensor, noise: Tensor, sigma: float) -> Tensor:
        """``(1 - sigma) * clean + sigma * noise``."""
        return kernels.add_noise(clean, noise, sigma)

    def sample(
        self, x: Tensor, predict_flow: Callable[[Tensor, Step], Tensor], draw: Callable[[Step], Tensor]
    ) -> Tensor:
        """Run all steps from noise ``x``; ``predict_flow(x, step)`` is the model, ``draw(step)`` fresh noise."""
        state = self.begin()
        for step in self.steps:
            x = self.transition(x, predict_flow(x, step), step, lambda step=step: draw(step), state)
        return x

    def _steps(self, count: int) -> tuple[Step, ...]:
        sigmas, timesteps = self.sigmas(count).tolist(), self.timesteps(count).tolist()
        if any(a <= b for a, b in pairwise(sigmas)):
            raise ConfigError(
                f"{count} steps cannot be told apart in float32 with {self.config}; use fewer steps or a smaller shift"
            )
        return tuple(Step(i, sigmas[i], sigmas[i + 1], timesteps[i], self.eta) for i in range(count))


class FlowMatchEulerScheduler(Scheduler):
    """Euler's method on the flow (``eta = 0``)."""

    config: FlowMatchEulerSchedulerConfig

    def sigmas(self, steps: int) -> Tensor:
        table = tables.linear if self.config.table == "linear" else tables.diffusers_euler
        return torch.tensor(table(steps, self.config.shift), dtype=torch.float64).float()


class FewStepScheduler(Scheduler):
    """Predict the clean latent and re-noise it to the next distilled level (``eta = 1``)."""

    config: FewStepSchedulerConfig
    eta = 1.0

    def sigmas(self, steps: int) -> Tensor:
        config = self.config
        if steps != len(config.denoising_steps):
            raise ConfigError(f"{steps} steps were asked of a model distilled for {config.denoising_steps}")
        if config.warp:
            levels = [t / 1000 for t in tables.warped_steps(config.denoising_steps, config.shift)]
        else:
            levels = [tables.nearest(t, config.shift) for t in config.denoising_steps]
        return torch.tensor([*levels, 0.0], dtype=torch.float64).float()

    def timesteps(self, steps: int) -> Tensor:
        """The warped timesteps, or the distilled ones as they are."""
        if self.config.warp:
            return super().timesteps(steps)
        return torch.tensor(self.config.denoising_steps, dtype=torch.float32)


class MultistepScheduler(Scheduler):
    """A deterministic solver with a history, on a published table whose timesteps are cut off to whole numbers."""

    kernel: Callable[[Tensor, Tensor, float, float, SolverState], Tensor]

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

    def transition(
        self, x: Tensor, flow: Tensor, step: Step, draw: Callable[[], Tensor], state: SolverState | None = None
    ) -> Tensor:
        if state is None:
            raise ValueError(f"{type(self).__name__} looks back over a chunk's steps; give it the state of begin()")
        clean = kernels.clean_estimate(x, flow, step.sigma)
        return type(self).kernel(x, clean, step.sigma, step.sigma_next, state)


class UniPCScheduler(MultistepScheduler):
    """UniPC of order 2."""

    config: UniPCSchedulerConfig
    kernel = staticmethod(unipc_step)

    def levels(self, steps: int) -> list[float]:
        table = tables.native_unipc if self.config.table == "native" else tables.diffusers_unipc
        return table(steps, self.config.shift)


class DPMPPScheduler(MultistepScheduler):
    """DPM-Solver++(2M)."""

    config: DPMPPSchedulerConfig
    kernel = staticmethod(dpmpp_step)

    def levels(self, steps: int) -> list[float]:
        return tables.native_dpmpp(steps, self.config.shift)
