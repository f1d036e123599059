"""Which denoising steps of a rollout are stochastic: pure functions of the step count and the rollout's number.

A step that is not stochastic costs no stored state and no pass in replay. Each schedule gives the same steps to every
worker that knows the number of the rollout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from flashdreams.config import ConfigError

Strategy = Literal["progressive", "random"]


@dataclass(frozen=True, kw_only=True)
class AllSteps:
    """Every step of a stretch of the schedule, or some of them, drawn anew for each rollout.

    Args:
        fraction: the stretch, as parts of the schedule: step ``int(total * a)`` up to, not including,
            ``int(total * b)``.
        num_steps: how many to draw; 0 for none, as forward-process training needs; None for all.
    """

    fraction: tuple[float, float] = (0.0, 1.0)
    num_steps: int | None = None

    def __post_init__(self) -> None:
        low, high = self.fraction
        if not 0 <= low <= high <= 1:
            raise ConfigError(f"fraction is {self.fraction}; expected two numbers from 0 to 1, rising")
        if self.num_steps is not None and self.num_steps < 0:
            raise ConfigError(f"num_steps is {self.num_steps}; expected 0 or more, or None for all")

    def stochastic(self, total: int, rollout: int) -> tuple[int, ...]:
        """Numbers of the stochastic ones of ``total`` steps in rollout number ``rollout``, rising.

        Raises:
            ConfigError: more steps are to be drawn than there are.
        """
        _check(total, rollout)
        pool = range(int(total * self.fraction[0]), int(total * self.fraction[1]))
        if self.num_steps is None:
            return tuple(pool)
        if self.num_steps > len(pool):
            raise ConfigError(
                f"num_steps is {self.num_steps}, and {self.fraction} of {total} steps are {len(pool)}; "
                "draw fewer, or widen the fraction"
            )
        drawn = np.random.default_rng(rollout).choice(len(pool), self.num_steps, replace=False)
        return tuple(sorted(pool[i] for i in drawn.tolist()))


@dataclass(frozen=True, kw_only=True)
class Window:
    """A run of neighbouring steps that moves from rollout to rollout (MixGRPO, https://arxiv.org/abs/2507.21802).

    Only whole windows are taken: steps after the last whole one are never stochastic.

    Args:
        strategy: ``progressive`` moves on towards clean after every ``rollouts`` rollouts; ``random`` begins anywhere.
        size: steps in the window.
        rollouts: how many of them a progressive window stays for.
        first: where the first progressive window begins.
        overlap: steps that a progressive window shares with the one before it.
        roll_back: begin again after the last progressive window, instead of staying there.
    """

    strategy: Strategy = "progressive"
    size: int = 4
    rollouts: int = 25
    first: int = 0
    overlap: int = 0
    roll_back: bool = False

    def __post_init__(self) -> None:
        if self.strategy not in get_args(Strategy):
            raise ConfigError(f"strategy is {self.strategy!r}; expected progressive or random")
        for name in ("size", "rollouts"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} of a window is {getattr(self, name)}; expected 1 or more")
        if self.first < 0 or not 0 <= self.overlap < self.size:
            raise ConfigError(
                f"first is {self.first} and overlap {self.overlap}; expected a step from 0, and an overlap from 0 to "
                f"below the size, {self.size}"
            )

    def stochastic(self, total: int, rollout: int) -> tuple[int, ...]:
        """As :meth:`AllSteps.stochastic`; ConfigError if the window does not fit in ``total`` steps."""
        _check(total, rollout)
        first = self.first if self.strategy == "progressive" else 0
        if first + self.size > total:
            raise ConfigError(
                f"a window of {self.size} steps from step {first} does not fit in {total}; make it smaller"
            )
        if self.strategy == "random":
            start = int(np.random.default_rng(rollout).integers(total - self.size + 1))
        else:
            stride = self.size - self.overlap
            windows = (total - first - self.size) // stride + 1
            moves = rollout // self.rollouts
            start = first + stride * (moves % windows if self.roll_back else min(moves, windows - 1))
        return tuple(range(start, start + self.size))


Schedule = AllSteps | Window


def _check(total: int, rollout: int) -> None:
    if total < 1 or rollout < 0:
        raise ConfigError(f"{total} steps and rollout number {rollout} were given; expected 1 or more, and 0 or more")
