"""Shrunken models: every part of the published structure, in sizes that a test can afford."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cosmos_predict2._conditions import CosmosConditions
from cosmos_predict2.config import COSMOS_PREDICT2_CONFIGS
from flashdreams.config import derive_config
from flashdreams.infra.config import RunnerConfig

Shrink = Callable[..., RunnerConfig]


@pytest.fixture
def shrunk() -> Shrink:
    """The runner of a slug with a small network, text encoder and VAE, and random weights; three steps, 9 frames."""

    def shrink(slug: str = "cosmos-predict2.5-2b") -> RunnerConfig:
        network = {
            "dim": 48, "num_heads": 2, "num_layers": 2, "ffn_dim": 64, "text_dim": 96, "text_len": 180,
            "context_dim": 12, "adaln_dim": 8,
        }  # fmt: skip
        text_encoder = {
            "dtype": "float32", "checkpoint_path": None, "text_len": 180, "vocab_size": 259, "dim": 48, "ffn_dim": 64,
            "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
        }  # fmt: skip
        patch = {
            "diffusion_model": {
                "transformer": {"dtype": "float32", "checkpoint_path": None, "network": network},
                "scheduler": {"num_steps": 3},
            },
            "text_encoder": text_encoder,
            "decoder": {"dim": 8, "num_res_blocks": 1, "checkpoint_path": None},
            "height": 32,
            "width": 48,
        }
        return derive_config(COSMOS_PREDICT2_CONFIGS[slug], pipeline=patch, default_num_frames=9)

    return shrink


@pytest.fixture
def prompt() -> CosmosConditions:
    """Embeddings of a prompt and of the negative prompt, of the width that shrunken networks take."""
    generator = torch.Generator().manual_seed(5)
    text, negative = (torch.randn(1, 6, 96, generator=generator) for _ in range(2))
    return CosmosConditions(text, negative)


@pytest.fixture
def pictures() -> Callable[..., Tensor]:
    """Random pictures, uint8 ``[F, H, W, 3]``."""

    def draw(count: int = 1, height: int = 32, width: int = 48) -> Tensor:
        generator = torch.Generator().manual_seed(count)
        return torch.randint(0, 256, (count, height, width, 3), dtype=torch.uint8, generator=generator)

    return draw
