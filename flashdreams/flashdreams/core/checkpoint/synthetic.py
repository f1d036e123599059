"""Weights drawn from a seed, for benchmarks and plans of models whose weights are not at hand."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

_BLOCK = 4_194_301
"""Numbers drawn per tensor; larger tensors repeat them. A prime, so that no two rows of a matrix are alike."""


def random_tensor(key: str, shape: torch.Size, dtype: torch.dtype, seed: int) -> Tensor:
    """The tensor that ``random:SEED`` has under ``key``: the same in any process, order and dtype (up to rounding).

    Matrices have variance 1 / fan-in, biases are small, other vectors (the gains of norms) are near one, so that
    activations stay finite at any depth. Integers are zero.
    """
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype)
    word = hashlib.blake2b(f"{seed}:{key}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(word, "little") >> 1)
    count = math.prod(shape)
    block = torch.randn(min(count, _BLOCK), generator=generator)
    if len(shape) > 1:
        block.mul_(math.prod(shape[1:]) ** -0.5 if count else 1.0)
    else:
        block.mul_(0.02).add_(0.0 if key.endswith("bias") else 1.0)
    if count <= _BLOCK:
        return block.to(dtype).view(shape)
    block = block.to(dtype)
    whole = torch.empty(count, dtype=dtype)
    for start in range(0, count, _BLOCK):
        whole[start : start + _BLOCK] = block[: count - start]
    return whole.view(shape)
