"""Locality-constrained block-sparse self-attention: which windows of keys each window of queries reads.

Tokens are taken in windows of two frames by eight rows by eight columns, in the order frame, row, column within one.
The windows of two frames are a *row*; rows of the past stay in the rolling cache. Neither the scores nor the selection
nor attention itself depends on the order of rows, so that the ring's order will do.
"""

from __future__ import annotations

import math

import torch
from einops import rearrange
from torch import Tensor

from flashdreams.core.attention import block_sparse_attention
from flashdreams.core.kv_cache import RollingKVCache
from flashdreams.core.rope import apply_rope
from flashdreams.recipes.wan.network import ChunkContext, SelfAttention
from flashvsr.config import FlashVSRNetworkConfig

REFERENCE_AREA = 768 * 1280
"""Pixels at which ``sparse_ratio`` is the share of all pairs of windows of a row, as published."""
PIXELS_PER_TOKEN = 16 * 16


class SparseSelfAttention(SelfAttention):
    """Self-attention of the Wan block over selected windows of the cache, which it keeps in windowed order."""

    def __init__(self, config: FlashVSRNetworkConfig) -> None:
        super().__init__(config)
        self.window = config.window
        self.sparse_ratio = config.sparse_ratio
        self.local_range = config.local_range
        self.sparse_backend = config.sparse_attention

    def forward(self, x: Tensor, context: ChunkContext, cache: RollingKVCache | None) -> Tensor:
        assert cache is not None
        assert context.slots is not None
        q = self.norm_q(self.q(x)).unflatten(-1, (self.heads, -1))
        k = self.norm_k(self.k(x)).unflatten(-1, (self.heads, -1))
        v = self.v(x).unflatten(-1, (self.heads, -1))
        q, k = apply_rope(q, context.rope), apply_rope(k, context.rope)
        q, k, v = (into_windows(part, context.shape, self.window) for part in (q, k, v))
        cache.write(k, v, context.slots)
        k, v = cache.read(context.visible)
        grid = context.shape[1] // self.window[1], context.shape[2] // self.window[2]
        tokens = math.prod(self.window)
        topk = budget(grid, self.window, self.sparse_ratio)
        mask = select_windows(q, k, grid, tokens, topk, self.local_range)
        y = block_sparse_attention(
            q, k, v, mask, block_q=tokens, block_k=tokens, backend=self.sparse_backend,
            selected=mask.shape[2] // math.prod(grid) * min(topk, math.prod(grid) * mask.shape[3] - 1),
        )  # fmt: skip
        return self.o(out_of_windows(y, context.shape, self.window).flatten(-2))


def into_windows(x: Tensor, shape: tuple[int, int, int], window: tuple[int, int, int]) -> Tensor:
    """Tokens ``[B, L, heads, head_dim]`` of a grid ``shape`` from frame-major into windowed order."""
    t, r, c = (size // side for size, side in zip(shape, window, strict=True))
    p, q, s = window
    return rearrange(x, "b (t p r q c s) h d -> b (t r c p q s) h d", t=t, p=p, r=r, q=q, c=c, s=s)


def out_of_windows(x: Tensor, shape: tuple[int, int, int], window: tuple[int, int, int]) -> Tensor:
    """Inverse of :func:`into_windows`."""
    t, r, c = (size // side for size, side in zip(shape, window, strict=True))
    p, q, s = window
    return rearrange(x, "b (t r c p q s) h d -> b (t p r q c s) h d", t=t, p=p, r=r, q=q, c=c, s=s)


def budget(grid: tuple[int, int], window: tuple[int, int, int], sparse_ratio: float) -> int:
    """Pairs of windows that one row of queries may read, in all. It does not grow with the rows in the cache.

    Args:
        grid: windows of a row, down and across.
    """
    windows = math.prod(grid)
    pixels = windows * window[1] * window[2] * PIXELS_PER_TOKEN
    return max(1, int(windows**2 * (sparse_ratio * REFERENCE_AREA / pixels)) - 1)


def neighbours(grid: tuple[int, int], local_range: int, device: torch.device | str = "cpu") -> Tensor:
    """Which windows of a row may see which, boolean ``[N, N]``: those within ``local_range`` windows down and across.

    The square around a window is cut off at the border, not moved inwards; of an even range, one window more lies
    before than after.
    """
    down, across = (_near(side, local_range, device) for side in grid)
    return (down[:, None, :, None] & across[None, :, None, :]).flatten(2).flatten(0, 1)


def select_windows(q: Tensor, k: Tensor, grid: tuple[int, int], tokens: int, topk: int, local_range: int) -> Tensor:
    """Which windows of keys each window of queries reads, boolean ``[B, heads, Nq, Nk]``.

    Windows are scored by their mean query and mean key. Of all pairs of one row of queries, the ``topk`` best are taken
    together, so that some windows read more than others, and a window may read nothing.

    Args:
        q, k: ``[B, Nq * tokens, heads, head_dim]``, ``[B, Nk * tokens, heads, head_dim]``, in windowed order.
        grid: windows of a row, down and across.
        tokens: tokens of a window.
    """
    windows = math.prod(grid)
    wide = torch.promote_types(q.dtype, torch.float32)
    mean_q, mean_k = (x.unflatten(1, (-1, tokens)).mean(2, dtype=wide) for x in (q, k))
    scores = torch.einsum("bqhd,bkhd->bhqk", mean_q, mean_k) / math.sqrt(q.shape[-1])
    scores = scores.unflatten(3, (-1, windows)).unflatten(2, (-1, windows))
    near = neighbours(grid, local_range, q.device)[:, None]
    weights = scores.masked_fill(~near, float("-inf")).flatten(4).softmax(-1)
    pairs = weights.flatten(3)
    count = min(topk, pairs.shape[-1] - 1)
    threshold = pairs.topk(count + 1, sorted=True).values[..., -1:]
    return (pairs > threshold).view_as(weights).flatten(2, 3)


def _near(side: int, local_range: int, device: torch.device | str) -> Tensor:
    place = torch.arange(side, device=device)
    offset = place[None, :] - (place[:, None] - local_range // 2)
    return (offset >= 0) & (offset < local_range)
