"""Rotary positions of Cosmos: axes with bases of their own, and halves of a head rotated against each other."""

from __future__ import annotations

import torch
from torch import Tensor

from flashdreams.core.rope import Rope, axis_dims


def rope_angles(
    shape: tuple[int, int, int], head_dim: int, theta: float, extrapolation: tuple[float, float, float]
) -> Tensor:
    """Angles ``[T * rows * columns, head_dim // 2]`` in float64 of a grid of tokens: time, row, column.

    Args:
        shape: latent frames, rows and columns of tokens.
        extrapolation: of each axis, the ratio ``r`` by which its base grows: ``theta * r ** (d / (d - 2))`` for an axis
            of ``d`` dimensions (NTK-aware scaling).
    """
    parts = []
    for axis, (dim, ratio) in enumerate(zip(axis_dims(head_dim), extrapolation, strict=True)):
        base = theta * ratio ** (dim / (dim - 2))
        frequency = base ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        angle = torch.arange(shape[axis], dtype=torch.float64)[:, None] * frequency
        view = [1, 1, 1, dim // 2]
        view[axis] = shape[axis]
        parts.append(angle.view(view).expand(*shape, dim // 2))
    return torch.cat(parts, dim=-1).flatten(0, 2)


def rotate_halves(x: Tensor, rope: Rope) -> Tensor:
    """Rotate ``x`` ``[B, L, heads, head_dim]``, dimension ``i`` against ``i + head_dim // 2``; computed in at least
    float32, returned in ``x``'s dtype."""
    first, second = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    cos, sin = rope.cos[:, None], rope.sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
