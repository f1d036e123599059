"""Rotary position embedding over (time, row, column), interleaved pairs (Wan2.1 ``rope_params``/``rope_apply``).

Angles come from the positions themselves, in float64, so no table can run out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rope:
    """``cos`` and ``sin`` of one run of tokens, ``[L, head_dim // 2]``."""

    cos: Tensor
    sin: Tensor

    def to(self, device: torch.device | str) -> Rope:
        return Rope(self.cos.to(device), self.sin.to(device))

    def __getitem__(self, tokens: slice) -> Rope:
        return Rope(self.cos[tokens], self.sin[tokens])


def axis_dims(head_dim: int) -> tuple[int, int, int]:
    """Real dimensions given to time, height and width: ``d - 4(d//6), 2(d//6), 2(d//6)``."""
    spatial = 2 * (head_dim // 6)
    return head_dim - 2 * spatial, spatial, spatial


def rope_3d(
    frames: Sequence[int] | Tensor,
    height: int,
    width: int,
    head_dim: int,
    theta: float = 10000.0,
    dtype: torch.dtype = torch.float32,
) -> Rope:
    """Angles of a ``[len(frames), height, width]`` token grid, frame-major then row then column.

    Args:
        frames: absolute latent frame of each frame in the grid; any integers, repeats allowed.
        height, width: tokens per column and per row.
        head_dim: even; split over the axes by :func:`axis_dims`.
        theta: base of the geometric series of frequencies.
        dtype: of the result; the angles themselves are float64.
    """
    if head_dim % 2:
        raise ValueError(f"head_dim is {head_dim}; rotary embedding needs an even number")
    positions = torch.as_tensor(frames, dtype=torch.float64, device="cpu")
    axes = (positions, torch.arange(height, dtype=torch.float64), torch.arange(width, dtype=torch.float64))
    shape = (len(positions), height, width)
    parts = []
    for axis, (position, dim) in enumerate(zip(axes, axis_dims(head_dim), strict=True)):
        frequency = theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        angle = position[:, None] * frequency
        view = [1, 1, 1, dim // 2]
        view[axis] = shape[axis]
        parts.append(angle.view(view).expand(*shape, dim // 2))
    angles = torch.cat(parts, dim=-1).reshape(-1, head_dim // 2)
    return Rope(angles.cos().to(dtype), angles.sin().to(dtype))


def apply_rope(x: Tensor, rope: Rope) -> Tensor:
    """Rotate ``x`` ``[B, L, heads, head_dim]``; computed in at least float32, returned in ``x``'s dtype."""
    pairs = x.unflatten(-1, (-1, 2))
    pairs = pairs.float() if x.dtype in (torch.bfloat16, torch.float16) else pairs
    cos, sin = rope.cos[:, None], rope.sin[:, None]
    even, odd = pairs.unbind(-1)
    rotated = torch.stack(
        (torch.addcmul(even * cos, odd, sin, value=-1), torch.addcmul(even * sin, odd, cos)), dim=-1
    )  # half the passes over memory of products and sums apart
    return rotated.flatten(-2).to(x.dtype)
