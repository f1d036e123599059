"""The umT5 encoder, with the key names of Wan's checkpoint (Wan2.1 ``wan/modules/t5.py``)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from flashdreams.recipes.wan.layers import RMSNorm
from flashdreams.recipes.wan.umt5_config import UMT5Config


class RelativePositions(nn.Module):
    """A learned score per head for each class of distance between query and key."""

    def __init__(self, config: UMT5Config) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.num_buckets, config.num_heads)

    def forward(self, buckets: Tensor) -> Tensor:
        """``[L, L] -> [heads, L, L]``."""
        return self.embedding(buckets).permute(2, 0, 1)


class Attention(nn.Module):
    """Self-attention with unscaled scores and a bias per head and pair, softmax in at least float32."""

    def __init__(self, config: UMT5Config) -> None:
        super().__init__()
        self.heads = config.num_heads
        self.q = nn.Linear(config.dim, config.dim_attn, bias=False)
        self.k = nn.Linear(config.dim, config.dim_attn, bias=False)
        self.v = nn.Linear(config.dim, config.dim_attn, bias=False)
        self.o = nn.Linear(config.dim_attn, config.dim, bias=False)

    def forward(self, x: Tensor, bias: Tensor, padding: Tensor | None) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        scores = q @ k.transpose(2, 3) + bias
        if padding is not None:
            scores = scores.masked_fill(padding[:, None, None], torch.finfo(scores.dtype).min)
        weights = scores.to(torch.promote_types(scores.dtype, torch.float32)).softmax(-1).to(v.dtype)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """A gated linear unit with tanh-approximated GELU."""

    def __init__(self, config: UMT5Config) -> None:
        super().__init__()
        self.gate = nn.Sequential(nn.Linear(config.dim, config.dim_ffn, bias=False), nn.GELU("tanh"))
        self.fc1 = nn.Linear(config.dim, config.dim_ffn, bias=False)
        self.fc2 = nn.Linear(config.dim_ffn, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc1(x) * self.gate(x))


class Block(nn.Module):
    """Attention and feed-forward, each normed first and added; every block has relative positions of its own."""

    def __init__(self, config: UMT5Config) -> None:
        super().__init__()
        self.norm1 = RMSNorm(config.dim, config.eps)
        self.attn = Attention(config)
        self.norm2 = RMSNorm(config.dim, config.eps)
        self.ffn = FeedForward(config)
        self.pos_embedding = RelativePositions(config)

    def forward(self, x: Tensor, buckets: Tensor, padding: Tensor | None) -> Tensor:
        x = x + self.attn(self.norm1(x), self.pos_embedding(buckets), padding)
        return x + self.ffn(self.norm2(x))


class UMT5Encoder(nn.Module):
    """Token ids to hidden states."""

    def __init__(self, config: UMT5Config) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.dim, config.eps)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Hidden states ``[B, L, dim]`` of ``ids`` ``[B, L]``.

        Where ``mask`` ``[B, L]`` is 0 there is padding: no token attends to it, and its own rows mean nothing.
        """
        padding = None if mask is None else mask == 0
        buckets = relative_buckets(ids.shape[1], self.config.num_buckets, self.config.max_distance).to(ids.device)
        x = self.token_embedding(ids)
        for block in self.blocks:
            x = block(x, buckets, padding)
        return self.norm(x)


def relative_buckets(length: int, num_buckets: int, max_distance: int) -> Tensor:
    """Class of the distance from each query (row) to each key (column), int64 ``[length, length]``.

    The lower half of the classes is for keys at or before the query, the upper half for those after it. Of either half,
    the first half tells single distances apart, the second grows logarithmically to ``max_distance`` and beyond.
    """
    position = torch.arange(length)
    relative = position[None] - position[:, None]
    half, exact = num_buckets // 2, num_buckets // 4
    distance = relative.abs()
    growth = (distance.clamp(min=1).double() / exact).log() / math.log(max_distance / exact)
    coarse = (exact + growth * (half - exact)).long().clamp(max=half - 1)
    return half * (relative > 0) + torch.where(distance < exact, distance, coarse)
