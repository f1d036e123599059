"""Shrunken models: every part of the published structure, in sizes that a test can afford."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flashdreams.config import derive_config
from flashdreams.infra.config import RunnerConfig
from flashdreams.recipes.wan.conditions import WanConditions
from wan21.config import WAN21_CONFIGS

Shrink = Callable[[str], RunnerConfig]


@pytest.fixture
def shrunk() -> Shrink:
    """The runner of a slug with a small network, VAE and CLIP, and random weights."""

    def shrink(slug: str) -> RunnerConfig:
        runner = WAN21_CONFIGS[slug]
        network = {"dim": 48, "ffn_dim": 64, "num_heads": 2, "num_layers": 2, "text_dim": 8, "text_len": 6}
        patch = {
            "diffusion_model.transformer": {"dtype": "float32", "checkpoint_path": None, "network": network},
            "diffusion_model.scheduler.num_steps": 3,
            "decoder": {"dim": 8, "num_res_blocks": 1, "checkpoint_path": None},
            "height": 32,
            "width": 48,
        }
        if runner.pipeline.image_encoder is not None:
            images = 2 if runner.pipeline.diffusion_model.transformer.takes_last_image else 1
            network |= {"image_dim": 16, "image_tokens": 5 * images}
            patch["image_encoder"] = {
                "dtype": "float32", "checkpoint_path": None, "image_size": 28, "dim": 16, "mlp_ratio": 2,
                "out_dim": 8, "num_heads": 2, "num_layers": 3,
            }  # fmt: skip
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
