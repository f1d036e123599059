"""The small parts of a Wan network: norms, activation, modulation, the sinusoid of a timestep."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashdreams.recipes.wan.config import WanNetworkConfig


class RMSNorm(nn.Module):
    """``x * rsqrt(mean(x^2) + eps) * weight`` over the last axis, the mean in at least float32."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(at_least_float32(x.dtype))
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


class TanhGELU(nn.Module):
    """GELU in its approximation by tanh.

    Compiled, by ``x (1 + tanh u) / 2 = x sigmoid(2 u)``: on a CPU, tanh is what costs most in a block after its matrix
    products, and exp less than half. Uncompiled, PyTorch's one kernel is better than five.
    """

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            return F.gelu(x, approximate="tanh")
        wide = x.to(at_least_float32(x.dtype))
        twice = 2 * math.sqrt(2 / math.pi)
        return (wide * torch.sigmoid(wide * (twice + 0.044715 * twice * wide * wide))).to(x.dtype)


class ImageEmbedding(nn.Module):
    """Image tokens of a vision encoder to the width of the network."""

    def __init__(self, config: WanNetworkConfig) -> None:
        super().__init__()
        width = config.image_dim
        assert width is not None
        self.proj = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, config.dim),
            nn.LayerNorm(config.dim),
        )  # fmt: skip
        if config.image_positions:
            self.emb_pos = nn.Parameter(torch.zeros(1, config.image_tokens, width))

    def forward(self, tokens: Tensor) -> Tensor:
        """``[B, S, image_dim] -> [B, S, dim]``."""
        before, first, gelu, second, after = self.proj
        assert isinstance(before, nn.LayerNorm)
        assert isinstance(after, nn.LayerNorm)
        if hasattr(self, "emb_pos"):
            tokens = tokens + self.emb_pos
        return layer_norm(second(gelu(first(layer_norm(tokens, before)))), after)


def sinusoid(timestep: Tensor, dim: int) -> Tensor:
    """``[cos, sin]`` of ``t * 10000^(-i / (dim/2))`` in float64: ``[N] -> [N, dim]``."""
    half = dim // 2
    frequency = 10000.0 ** (-torch.arange(half, dtype=torch.float64, device=timestep.device) / half)
    angle = timestep.double()[:, None] * frequency
    return torch.cat((angle.cos(), angle.sin()), dim=1)


def modulate(x: Tensor, shift: Tensor, scale: Tensor, eps: float) -> Tensor:
    """``LN(x) * (1 + scale) + shift`` with ``x`` ``[B, L, D]`` and ``shift``, ``scale`` ``[B, F, 1, D]``, ``F | L``."""
    wide = x.to(at_least_float32(x.dtype))
    y = F.layer_norm(wide, x.shape[-1:], eps=eps).unflatten(1, (shift.shape[1], -1))
    return torch.addcmul(shift, y, 1 + scale).flatten(1, 2).to(x.dtype)


def gated_add(x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    """``x + gate * y`` with ``x``, ``y`` ``[B, L, D]`` and ``gate`` ``[B, F, 1, D]``."""
    frames = gate.shape[1]
    y = y.unflatten(1, (frames, -1))
    return torch.addcmul(x.unflatten(1, (frames, -1)), y, gate).flatten(1, 2).to(x.dtype)


def layer_norm(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    """Affine layer norm in at least float32."""
    wide = at_least_float32(x.dtype)
    weight, bias = norm.weight.to(wide), norm.bias.to(wide)
    return F.layer_norm(x.to(wide), norm.normalized_shape, weight, bias, norm.eps).to(x.dtype)


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def wide_linear(linear: nn.Module, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    assert isinstance(linear, nn.Linear)
    return linear.weight.to(dtype), linear.bias.to(dtype)
