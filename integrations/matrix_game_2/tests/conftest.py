"""Shrunken models: every part of the published structure, in sizes that a test can afford."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flashdreams.config import derive_config
from flashdreams.infra.config import RunnerConfig
from flashdreams.infra.pipeline import StreamInferencePipeline
from flashdreams.recipes.template.config import TemplateCodecConfig
from matrix_game_2.config import MATRIX_GAME_2_CONFIGS

Shrink = Callable[..., RunnerConfig]


@pytest.fixture
def shrunk() -> Shrink:
    """The runner of a slug with a small network, VAE and CLIP; all weights random, the action modules' heads too."""

    def shrink(slug: str, **changes: Any) -> RunnerConfig:
        network = {
            "dim": 48, "ffn_dim": 64, "num_heads": 2, "num_layers": 2, "freq_dim": 16, "image_dim": 16,
            "image_tokens": 5, "action_blocks": 1, "action_dim": 32, "action_heads": 2, "action_embed_dim": 8,
        }  # fmt: skip
        patch = {
            "diffusion_model.transformer": {"dtype": "float32", "checkpoint_path": "random:0", "network": network},
            "decoder": {"dim": 8, "num_res_blocks": 1, "checkpoint_path": None},
            "image_encoder": {
                "dtype": "float32", "checkpoint_path": None, "image_size": 28, "dim": 16, "mlp_ratio": 2,
                "out_dim": 8, "num_heads": 2, "num_layers": 3,
            },
            "height": 32,
            "width": 48,
        }  # fmt: skip
        return derive_config(MATRIX_GAME_2_CONFIGS[slug], pipeline={**patch, **changes})

    return shrink


@pytest.fixture
def quick(shrunk) -> Shrink:
    """The same with a codec of no cost, where pixels do not matter: latents of 3 channels."""

    def shrink(slug: str) -> RunnerConfig:
        runner = shrunk(slug, decoder=TemplateCodecConfig())
        return derive_config(runner, {"pipeline.diffusion_model.transformer.network": {"in_dim": 10, "out_dim": 3}})

    return shrink


@pytest.fixture
def pipeline(quick) -> StreamInferencePipeline:
    return quick("matrix-game-2-universal").pipeline.setup()


@pytest.fixture
def picture() -> Tensor:
    """A random picture, uint8 ``[32, 48, 3]``."""
    return torch.randint(0, 256, (32, 48, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
