"""The weights of a golden file, made anew from key names, shapes and a seed.

Every tensor has a random stream of its own: PCG64 seeded with ``[seed, crc32(key)]`` gives standard normal numbers in
float64, rounded to float32, then scaled and offset in float32 by what the key says the tensor is.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

MODULATIONS = ("modulation", "scale_shift_table")
EMBEDDINGS = ("token_embedding", "pos_embedding", "cls_embedding", "emb_pos", "shared.weight", "embed_tokens")


def spread(key: str, shape: Sequence[int]) -> tuple[float, float]:
    """Scale and offset of the normal numbers of one tensor."""
    leaf, vector = key.rpartition(".")[2], len(shape) <= 1
    if leaf in MODULATIONS:
        return 0.1, 0.0
    if any(part in key for part in EMBEDDINGS):
        return 0.5, 0.0
    if leaf == "gamma" or (vector and leaf in ("weight", "scale")):
        return 0.1, 1.0  # the gain of a norm
    if leaf == "bias" or vector:
        return 0.02, 0.0
    return 1 / math.sqrt(math.prod(shape[1:])), 0.0  # a matrix or kernel: 1 / sqrt(fan-in)


def draw(key: str, shape: Sequence[int], seed: int) -> Tensor:
    """One tensor, float32."""
    scale, offset = spread(key, shape)
    normal = np.random.default_rng([seed, zlib.crc32(key.encode())]).standard_normal(tuple(shape))
    return torch.from_numpy(np.asarray(normal.astype(np.float32) * np.float32(scale) + np.float32(offset)))


def draw_all(shapes: Mapping[str, Sequence[int]], seed: int) -> dict[str, Tensor]:
    """The state dict of one model."""
    return {key: draw(key, shape, seed) for key, shape in shapes.items()}
