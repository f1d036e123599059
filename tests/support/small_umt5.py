"""A umT5 small enough for tests, and a tokenizer that needs no file."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from flashdreams.recipes.wan.umt5 import UMT5Encoder
from flashdreams.recipes.wan.umt5_config import UMT5Config

SMALL = UMT5Config(
    vocab_size=40, dim=24, dim_attn=32, dim_ffn=48, num_heads=4, num_layers=2, text_len=20, dtype="float32"
)


class Letters:
    """A token for each letter, and the end mark."""

    def encode(self, text: str) -> SimpleNamespace:
        return SimpleNamespace(ids=[2 + ord(letter) % 38 for letter in text] + [1])


def random_encoder(seed: int = 0) -> UMT5Encoder:
    """Random weights of sizes at which every part counts."""
    encoder = UMT5Encoder(SMALL).requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, weight in encoder.named_parameters():
        weight.copy_(torch.randn(weight.shape, generator=generator) * (0.3 if "norm" not in name else 0.1))
        weight += "norm" in name
    return encoder
