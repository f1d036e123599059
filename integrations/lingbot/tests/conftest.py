"""Shrunken models: every part of the published structure, in sizes that a test can afford."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flashdreams.config import derive_config
from flashdreams.infra.config import RunnerConfig
from flashdreams.recipes.wan.conditions import WanConditions
from lingbot.config import LINGBOT_CONFIGS
from member import shrunk as shrunk_member

Shrink = Callable[[str], RunnerConfig]


@pytest.fixture
def shrunk() -> Shrink:
    """The runner of a slug with small networks, a small VAE and random weights (all of them: the camera layers too); 32
    pixels high and 48 wide, three steps and at most 9 frames where it makes a whole clip."""

    def shrink(slug: str) -> RunnerConfig:
        runner = shrunk_member(LINGBOT_CONFIGS[slug])
        model = runner.pipeline.diffusion_model
        weights = {"transformer": {"checkpoint_path": "random:0"}}
        if model.high_noise:
            high = {"transformer": {"checkpoint_path": "random:1"}}
            weights |= {"high_noise": {0: high}, "scheduler": {"num_steps": 3}}
        runner = derive_config(runner, pipeline={"diffusion_model": weights})
        return derive_config(runner, default_num_frames=9) if model.high_noise else runner

    return shrink


@pytest.fixture
def prompt() -> WanConditions:
    """Embeddings of a prompt and of the negative prompt, of the width that shrunken networks take."""
    generator = torch.Generator().manual_seed(5)
    text, negative = (torch.randn(1, 6, 8, generator=generator) for _ in range(2))
    return WanConditions(text, negative)


@pytest.fixture
def picture() -> Callable[..., Tensor]:
    """A random picture, uint8 ``[H, W, 3]``."""

    def draw(height: int, width: int, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, generator=generator)

    return draw
