"""A reward that any model can be judged by, and short trainings of a small one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from flashdreams.posttrain.config import RewardConfig, TrainConfig
from flashdreams.posttrain.reward import Reward
from flashdreams.posttrain.trainer import Trainer
from template_model import template_pipeline


class Brightness(Reward):
    """How bright the last frame is, 0 to 1."""

    def prompts(self, count: int, seed: int, *, held_out: bool) -> list[str]:
        colours = ["blue", "white"] if held_out else ["red", "green"]
        return [f"a {colours[(seed + i) % 2]} circle on a gray background" for i in range(count)]

    def score(self, frames: Tensor, prompts: Any) -> dict[str, Tensor]:
        return {"reward": frames[:, -1].float().mean(dim=(1, 2, 3)) / 255}


@pytest.fixture(scope="session")
def brightness() -> Brightness:
    return Brightness(RewardConfig(name="brightness", description="The last frame is bright", has_prompts=True))


SHORT = {
    "groups": 2, "group_size": 2, "batch": 4, "iterations": 2, "eval_samples": 0, "videos": 0, "rank": 2, "lr": 3e-3,
}  # fmt: skip


@pytest.fixture
def training(brightness) -> Callable[..., Trainer]:
    """Makes a short training of the template, whose weights are random, or of the pipeline that is given."""

    def make(
        folder: Path, algorithm: str = "nft", *, pipeline: Any = None, resume: bool = False, **changes: Any
    ) -> Trainer:
        pipeline = pipeline or template_pipeline()
        config = TrainConfig(algorithm=algorithm, **SHORT | changes)  # ty: ignore[invalid-argument-type]
        return Trainer(config, pipeline, brightness, folder, resume=resume)

    return make
