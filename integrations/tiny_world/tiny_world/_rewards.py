"""Rewards on the vision code that reads frames back, and the prompts that leave open what is rewarded."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from flashdreams.posttrain.reward import Reward
from tiny_world._data import COLOUR_RGB, SIZE, Split, combinations, signed_distance
from tiny_world._measure import VALID_IOU
from tiny_world._vision import Reading, read_frame
from tiny_world._words import BACKGROUNDS, COLOURS, SHAPES
from tiny_world.rewards import ColourRewardConfig, PositionRewardConfig

AREAS = 0.6, 1.5
"""Of the mask, as parts of the whole shape's: between them it is there, once."""


@dataclass(frozen=True)
class Wanted:
    """What a prompt asks for, as ids; ``None`` where it leaves it open."""

    colour: int | None
    shape: int | None
    background: int | None


def wanted(prompt: str) -> Wanted:
    """What ``prompt`` says of colour, shape and background."""
    colour, shape, background = (
        re.search(pattern, prompt.lower())
        for pattern in (
            rf"\b({'|'.join(COLOURS)}) (?:{'|'.join(SHAPES)})\b",
            rf"\b({'|'.join(SHAPES)})\b",
            rf"\b({'|'.join(BACKGROUNDS)})(?: striped| plain)? background\b",
        )
    )
    return Wanted(
        None if colour is None else COLOURS.index(colour[1]),
        None if shape is None else SHAPES.index(shape[1]),
        None if background is None else BACKGROUNDS.index(background[1]),
    )


def intact(reading: Reading, want: Wanted) -> bool:
    """Whether one whole shape is there, as asked for."""
    if reading.shape < 0:
        return False
    low, high = (part * _area(reading.shape) for part in AREAS)
    fits = (want.colour in (None, reading.colour), want.shape in (None, reading.shape))
    return all(fits) and low <= reading.area <= high and reading.iou > VALID_IOU


class TinyWorldReward(Reward):
    """What both rewards have in common: prompts, and fidelity to them as measures of their own."""

    def prompts(self, count: int, seed: int, *, held_out: bool) -> list[str]:
        rng, sentences = np.random.default_rng([seed, count, held_out]), self.sentences(held_out)
        return [sentences[i] for i in rng.integers(0, len(sentences), count)]

    def sentences(self, held_out: bool) -> list[str]:
        """Every prompt that leaves open what is rewarded; those of one side are none of the other's."""
        raise NotImplementedError(type(self).__name__)

    def of(self, frame: np.ndarray, reading: Reading, want: Wanted) -> float:
        """The reward of the last frame, uint8 ``[H, W, 3]``."""
        raise NotImplementedError(type(self).__name__)

    def score(self, frames: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        rows = []
        for frame, prompt in zip(frames[:, -1].numpy(), prompts, strict=True):
            reading, want = read_frame(frame), wanted(prompt)
            rows.append({
                "reward": self.of(frame, reading, want),
                "colour": float(reading.shape >= 0 and want.colour in (None, reading.colour)),
                "shape": float(want.shape in (None, reading.shape)),
                "background": float(want.background in (None, reading.background)),
                "intact": float(intact(reading, want)),
                "x": float(np.nan_to_num(reading.centre[0], nan=0.0)),
            })  # fmt: skip
        return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}


class PositionReward(TinyWorldReward):
    """See :class:`PositionRewardConfig`."""

    config: PositionRewardConfig

    def sentences(self, held_out: bool) -> list[str]:
        split: Split = "heldout" if held_out else "train"
        return [f"a {COLOURS[c]} {SHAPES[s]} on a {BACKGROUNDS[b]} background" for c, s, b in combinations(split)]

    def of(self, frame: np.ndarray, reading: Reading, want: Wanted) -> float:
        if self.config.gated:
            return reading.centre[0] / SIZE if intact(reading, want) else 0.0
        bright = np.linalg.norm(frame.astype(np.float32) - np.median(frame, axis=(0, 1)), axis=-1)
        weight = np.where(bright > 0.1 * 255, bright, 0).sum(0)
        return float(weight @ np.arange(SIZE) / weight.sum() / SIZE) if weight.any() else 0.5


class ColourReward(TinyWorldReward):
    """See :class:`ColourRewardConfig`."""

    config: ColourRewardConfig

    def sentences(self, held_out: bool) -> list[str]:
        """Each shape and each background once is held out."""
        return [
            f"a {shape} moves right on a {background} background"
            for s, shape in enumerate(SHAPES)
            for b, background in enumerate(BACKGROUNDS)
            if (s == b) == held_out
        ]

    def of(self, frame: np.ndarray, reading: Reading, want: Wanted) -> float:
        if not intact(reading, want):
            return 0.0
        x, y = (round(c) for c in reading.centre)
        patch = frame[max(0, y - 24) : y + 24, max(0, x - 24) : x + 24].reshape(-1, 3).astype(np.float32) / 255
        away = np.linalg.norm(patch - np.median(frame, axis=(0, 1)) / 255, axis=-1)
        mean = np.median(patch[away > 0.8 * np.quantile(away, 0.95)], axis=0)
        goal = COLOUR_RGB[COLOURS.index(self.config.colour)]
        return float(max(0.0, 1 - np.linalg.norm(mean - goal)))


@cache
def _area(shape: int) -> float:
    """Pixels of a whole shape."""
    grid = np.arange(64, dtype=np.float32) - 32
    return float(np.clip(0.5 - signed_distance(shape, grid[None], grid[:, None]), 0, 1).sum())
