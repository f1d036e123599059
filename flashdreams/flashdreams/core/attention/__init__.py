"""One ``attention()`` with named backends, and one ``block_sparse_attention()``."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from flashdreams.core.attention.backends import BACKENDS, self_test
from flashdreams.core.attention.block_sparse import block_sparse_attention, block_sparse_self_test
from flashdreams.core.attention.block_sparse_backends import BLOCK_SPARSE_BACKENDS

__all__ = [
    "BACKENDS",
    "BLOCK_SPARSE_BACKENDS",
    "attention",
    "block_sparse_attention",
    "block_sparse_self_test",
    "by_head",
    "check_backend",
    "self_test",
]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    scale: float | None = None,
    backend: str = "sdpa",
) -> Tensor:
    """Softmax attention of ``q [B, L, H, D]`` over ``k, v [B, S, H, D]``; returns ``[B, L, H, D]``.

    Args:
        mask: boolean (True: may attend) or additive, broadcastable to ``[B, H, L, S]``.
        scale: factor of the scores; ``1 / sqrt(D)`` by default.
        backend: a name in :data:`BACKENDS`. Call :func:`check_backend` once before using one other than the default.
    """
    return BACKENDS[backend](q, k, v, mask, 1 / math.sqrt(q.shape[-1]) if scale is None else scale)


def by_head(x: Tensor) -> Tensor:
    """``x`` ``[B, S, H, D]`` laid out head by head in memory: a copy that pays for keys and values read many times."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@cache
def check_backend(name: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
    """Verify once per process that backend ``name`` exists and computes the right numbers here.

    Raises:
        ValueError: no such backend on this machine; names those there are.
        RuntimeError: its numeric self-test fails.
    """
    if name not in BACKENDS:
        raise ValueError(f"no attention backend {name!r} here; available: {', '.join(sorted(BACKENDS))}")
    self_test(name, device, dtype)
