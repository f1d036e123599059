"""The rewards see what the prompt leaves open, and give nothing for a picture that is not what it asks for."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from flashdreams.config import ConfigError
from flashdreams.plugins.registry import REWARDS as KIND
from flashdreams.plugins.registry import get_reward
from tiny_world._data import COLOUR_RGB, Clips, combinations, render
from tiny_world._rewards import Wanted, wanted
from tiny_world._words import BACKGROUNDS, COLOURS, SHAPES
from tiny_world.rewards import REWARDS, ColourRewardConfig, PositionRewardConfig

pytestmark = pytest.mark.ci_cpu

PROMPT = "a red circle on a blue background"


def picture(x: float, colour: str = "red", shape: str = "circle", y: float = 60.0) -> torch.Tensor:
    """One frame, uint8 ``[1, 1, 128, 128, 3]``, with a blue background."""
    row = np.zeros(1, int)
    clip = Clips(
        row + COLOURS.index(colour), row + SHAPES.index(shape), row + BACKGROUNDS.index("blue"), row.astype(bool), row,
        row[:, None], np.array([[[x, y]]], np.float32), [PROMPT],
    )  # fmt: skip
    return torch.from_numpy(render(clip))


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (PROMPT, ("red", "circle", "blue")),
        ("white cross moving left, green striped background", ("white", "cross", "green")),
        ("a red background with a green ring moving up", ("green", "ring", "red")),
        ("a diamond moves right on a red plain background", (None, "diamond", "red")),
        ("", (None, None, None)),
    ],
)
def test_prompts_are_read(prompt, expected):
    ids = zip((COLOURS, SHAPES, BACKGROUNDS), expected, strict=True)
    assert wanted(prompt) == Wanted(*(None if word is None else words.index(word) for words, word in ids))


def test_the_position_counts_where_the_picture_is_what_was_asked_for():
    reward = PositionRewardConfig().setup()
    left, right = (reward.score(picture(x), [PROMPT]) for x in (30, 90))
    assert left["reward"].item() == pytest.approx(30 / 128, abs=0.02)
    assert right["reward"].item() == pytest.approx(90 / 128, abs=0.02)
    assert {name: value.item() for name, value in right.items() if name not in ("reward", "x")} == {
        "colour": 1.0, "shape": 1.0, "background": 1.0, "intact": 1.0,
    }  # fmt: skip


def test_a_wrong_colour_or_shape_half_a_shape_or_nothing_has_no_reward():
    reward = PositionRewardConfig().setup()
    half = picture(90)
    half[:, :, :60] = picture(90, y=20)[:, :, 100:101]
    empty = picture(90)[:, :, :1].expand(1, 1, 128, 128, 3)
    cases = {
        "colour": picture(90, colour="green"), "shape": picture(90, shape="square"), "half": half, "empty": empty
    }  # fmt: skip
    scores = {name: reward.score(frames, [PROMPT]) for name, frames in cases.items()}
    assert all(score["reward"].item() == score["intact"].item() == 0.0 for score in scores.values())
    assert (
        scores["colour"]["colour"].item() == scores["shape"]["shape"].item() == scores["empty"]["colour"].item() == 0.0
    )


def test_without_its_gate_the_reward_can_be_had_without_a_shape_and_the_measures_show_it():
    """A faint glow at the right edge, which is what an early attempt learned to make."""
    glow = picture(90)[:, :, :1, :1].expand(1, 1, 128, 128, 3).clone()
    glow[:, :, :, 116:] += 40
    ungated, gated = (PositionRewardConfig(gated=gate).setup().score(glow, [PROMPT]) for gate in (False, True))
    assert ungated["reward"].item() > 0.9 > gated["reward"].item() == 0.0
    assert ungated["intact"].item() == ungated["shape"].item() == 0.0


def test_the_colour_counts_by_its_nearness():
    reward = ColourRewardConfig(colour="green").setup()
    prompt = "a circle moves right on a blue background"
    near = {name: reward.score(picture(60, colour=name), [prompt])["reward"].item() for name in COLOURS}
    for i, name in enumerate(COLOURS):
        away = float(np.linalg.norm(COLOUR_RGB[i] - COLOUR_RGB[COLOURS.index("green")]))
        assert near[name] == pytest.approx(max(0.0, 1 - away), abs=0.03)
    assert reward.score(picture(60, colour="green", shape="ring"), [prompt])["reward"].item() == 0.0
    with pytest.raises(ConfigError, match="colour is 'pink'; expected one of red"):
        ColourRewardConfig(colour="pink").setup()


@pytest.mark.parametrize("config", REWARDS.values(), ids=str)
def test_training_prompts_leave_open_what_is_rewarded_and_never_meet_the_held_out_ones(config):
    reward = config.setup()
    train, held = (reward.prompts(200, 3, held_out=flag) for flag in (False, True))
    assert train == reward.prompts(200, 3, held_out=False) != reward.prompts(200, 4, held_out=False)
    assert not set(train) & set(held)
    for want in map(wanted, (*train, *held)):
        assert want.shape is not None
        assert want.background is not None
        assert (want.colour is None) == (config.name == "tiny-world-colour")
    if config.name == "tiny-world-position":  # the model itself has not met these either
        assert {(w.colour, w.shape, w.background) for w in map(wanted, held)} <= set(combinations("heldout"))


def test_the_rewards_are_registered(monkeypatch):
    monkeypatch.setenv(KIND.variable, ",".join(f"{name}=tiny_world.rewards:REWARDS" for name in REWARDS))
    for name, config in REWARDS.items():
        assert get_reward(name) is config
        assert dataclasses.is_dataclass(config)
