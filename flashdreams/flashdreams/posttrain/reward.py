"""Contract of rewards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from flashdreams.posttrain.config import RewardConfig


class Reward:
    """Judges finished videos. It holds no state, so that the same frames have the same reward at any time."""

    def __init__(self, config: RewardConfig) -> None:
        self.config = config

    def prompts(self, count: int, seed: int, *, held_out: bool) -> list[str]:
        """Prompts to train on, or others that training never meets; the same for the same arguments.

        Only where ``config.has_prompts``.
        """
        raise NotImplementedError(f"{self.config.name} has no prompts of its own")

    def score(self, frames: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        """What is to grow, under the name ``reward``, and whatever else is worth watching: float ``[B]`` each.

        A model finds what a reward forgets. Let it be 0 where the video is not what the prompt asks for, and watch that
        in measures of their own.

        Args:
            frames: uint8 ``[B, T, H, W, 3]`` on the CPU.
            prompts: ``B`` of them.
        """
        raise NotImplementedError(type(self).__name__)
