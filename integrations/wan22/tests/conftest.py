"""Shrunken models: every part of the published structure, in sizes that a test can afford."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flashdreams.config import derive_config
from flashdreams.infra.config import RunnerConfig
from flashdreams.recipes.wan.conditions import WanConditions
from flashdreams.recipes.wan.vae_config import WanVAE22Config
from wan22.config import WAN22_CONFIGS

Shrink = Callable[[str], RunnerConfig]


@pytest.fixture
def shrunk() -> Shrink:
    """The runner of a slug with small networks, a small VAE and random weights; three steps, at most 9 frames."""

    def shrink(slug: str) -> RunnerConfig:
        runner = WAN22_CONFIGS[slug]
        network = {"dim": 48, "ffn_dim": 64, "num_heads": 2, "num_layers": 2, "text_dim": 8, "text_len": 6}
        transformer = {"dtype": "float32", "checkpoint_path": None, "network": network}
        decoder = {"dim": 8, "num_res_blocks": 1, "checkpoint_path": None}
        if isinstance(runner.pipeline.decoder, WanVAE22Config):
            decoder["decoder_dim"] = 8
        model = {"transformer": transformer, "scheduler": {"num_steps": 3}}
        if runner.pipeline.diffusion_model.high_noise:
            model["high_noise"] = {0: {"transformer": transformer}}
        patch = {"diffusion_model": model, "decoder": decoder, "height": 64, "width": 96}
        return derive_config(runner, pipeline=patch, default_num_frames=9)

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
