"""Configs of the rewards for post-training this model (torch-free)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flashdreams.config import ConfigError
from flashdreams.posttrain.config import RewardConfig
from tiny_world._words import COLOURS


@dataclass(frozen=True, kw_only=True)
class PositionRewardConfig(RewardConfig):
    """How far to the right the shape is in the last frame; 0 unless it is the shape that the prompt asks for."""

    _target: ClassVar[str] = "tiny_world._rewards:PositionReward"
    name: str = "tiny-world-position"
    description: str = "The shape goes to the right, where the prompt leaves its motion open"
    has_prompts: bool = True
    gated: bool = True
    """Whether only the right shape, whole and in the right colour, counts. Without, the model learns to cheat."""


@dataclass(frozen=True, kw_only=True)
class ColourRewardConfig(RewardConfig):
    """How near the shape's colour is to a given one in the last frame; 0 unless it is the shape asked for."""

    _target: ClassVar[str] = "tiny_world._rewards:ColourReward"
    name: str = "tiny-world-colour"
    description: str = "The shape is green, where the prompt leaves its colour open"
    has_prompts: bool = True
    colour: str = "green"

    def validate(self) -> None:
        super().validate()
        if self.colour not in COLOURS:
            raise ConfigError(f"colour is {self.colour!r}; expected one of {', '.join(COLOURS)}")


REWARDS = {config.name: config for config in (ColourRewardConfig(), PositionRewardConfig())}
