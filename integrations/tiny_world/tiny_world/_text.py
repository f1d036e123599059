"""The small text encoder: word ids to text tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flashdreams.infra.encoder import TextEncoder
from tiny_world._words import TEXT_LEN, VOCABULARY, tokenize
from tiny_world.config import TinyTextEncoderConfig


def tokenize_batch(prompts: Sequence[str]) -> Tensor:
    """Prompts -> int64 ids ``[B, TEXT_LEN]``."""
    return torch.tensor([tokenize(p) for p in prompts], dtype=torch.long).reshape(-1, TEXT_LEN)


class _TextBlock(nn.Module):
    """Pre-norm transformer layer over all ``TEXT_LEN`` tokens (pads are attended, as in Wan)."""

    def __init__(self, dim: int, num_heads: int, ffn_dim: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.ffn = nn.Sequential(nn.Linear(dim, ffn_dim), nn.GELU(approximate="tanh"), nn.Linear(ffn_dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, dim)
        x = x + self.out(mixed)
        return x + self.ffn(self.norm2(x))


class TinyTextEncoder(TextEncoder):
    """Prompts to text tokens ``[B, 12, dim]``; trained together with the network."""

    def __init__(self, config: TinyTextEncoderConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(len(VOCABULARY), config.dim)
        self.position = nn.Parameter(torch.randn(TEXT_LEN, config.dim) * 0.02)
        self.blocks = nn.ModuleList(
            _TextBlock(config.dim, config.num_heads, config.ffn_dim) for _ in range(config.num_layers)
        )
        self.norm = nn.LayerNorm(config.dim)
        nn.init.normal_(self.embedding.weight, std=0.5)

    def encode(self, prompts: Sequence[str]) -> Tensor:
        """``[B, 12, dim]``; unknown words and empty prompts are fine."""
        return self(tokenize_batch(prompts).to(self.position.device))

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids ``[B, 12]`` -> ``[B, 12, dim]``."""
        x = self.embedding(ids) + self.position
        for block in self.blocks:
            x = block(x)
        return self.norm(x)
