"""Few-step sampling on a solver's table whose timesteps are whole numbers, so that several levels share one."""

from __future__ import annotations

import torch
from torch import Tensor

from flashdreams.config import ConfigError
from flashdreams.infra.scheduler import tables
from flashdreams.infra.scheduler.config import IndexedFewStepSchedulerConfig
from flashdreams.infra.scheduler.kernels import RENOISE
from flashdreams.infra.scheduler.samplers import Scheduler, Step

TABLE = 1000
"""Levels of the table: as many as there are training steps."""


class IndexedFewStepScheduler(Scheduler):
    """Predict the clean latent and re-noise it to the next level.

    The levels are found again by their timesteps, as published (``FlowUniPCMultistepScheduler`` on 1000 steps): an
    estimate is made with the first level of its timestep, and noise is added to the second one where there are several.
    So the level that noise is added to is not quite the one the next estimate assumes.
    """

    config: IndexedFewStepSchedulerConfig
    kernel = RENOISE

    def sigmas(self, steps: int) -> Tensor:
        """Levels that the estimates are made with, and the final 0."""
        return torch.tensor([*(levels[0] for levels in self._levels(steps)), 0.0], dtype=torch.float64).float()

    def timesteps(self, steps: int) -> Tensor:
        table = tables.native_unipc(TABLE, self.config.shift)
        return torch.tensor([int(1000 * table[index]) for index in self._indices(steps)], dtype=torch.float32)

    def _steps(self, count: int) -> tuple[Step, ...]:
        levels, timesteps = self._levels(count), self.timesteps(count).tolist()
        if len(set(timesteps)) < count:
            raise ConfigError(f"the steps of {self.config} share timesteps ({timesteps}); give indices further apart")
        noised = [*(level[min(1, len(level) - 1)] for level in levels[1:]), 0.0]
        return tuple(Step(i, levels[i][0], noised[i], timesteps[i], self.kernel) for i in range(count))

    def _levels(self, steps: int) -> list[list[float]]:
        """For each step, the levels of the table with its timestep, falling."""
        table = tables.native_unipc(TABLE, self.config.shift)[:-1]
        return [[level for level in table if int(1000 * level) == int(1000 * table[i])] for i in self._indices(steps)]

    def _indices(self, steps: int) -> tuple[int, ...]:
        if steps != len(self.config.indices):
            raise ConfigError(f"{steps} steps were asked of a model distilled for those at {self.config.indices}")
        return self.config.indices
