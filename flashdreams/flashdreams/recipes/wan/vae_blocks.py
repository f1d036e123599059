"""Layers of the Wan video VAEs (2.1 and 2.2), with the key names of the published checkpoints.

Video features are ``[B, C, T, H, W]``. A layer that looks back in time keeps the frames it needs in ``states``, which
belongs to one stream; the layers themselves hold weights only.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashdreams.core.attention import attention

States = dict[str, Tensor]
"""Remembered frames of one stream by the path of the layer that needs them; no entry before its first chunk."""


def per_frame(layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply an image layer to every frame of ``[B, C, T, H, W]``."""
    batch, frames = x.shape[0], x.shape[2]
    y = layer(x.transpose(1, 2).flatten(0, 1))
    return y.unflatten(0, (batch, frames)).transpose(1, 2)


def name_states(root: nn.Module) -> None:
    """Tell every layer with states its own path under ``root``, the key of its entry. Call once, after building."""
    for path, module in root.named_modules():
        if isinstance(module, (CausalConv3d, StridedTimeConv)):
            module.path = path


class RMSNorm(nn.Module):
    """``x / max(|x|, 1e-12) * sqrt(C) * gamma``, the norm taken over the channels of one position."""

    def __init__(self, dim: int, spatial_axes: int = 3) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(dim, *[1] * spatial_axes))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=1) * (self.gamma * math.sqrt(self.gamma.shape[0]))


class CausalConv3d(nn.Conv3d):
    """Stride-1 convolution that sees the past only: ``kt - 1`` frames before the chunk, zeros before the stream."""

    def __init__(self, in_dim: int, out_dim: int, kernel: tuple[int, int, int] = (3, 3, 3)) -> None:
        super().__init__(in_dim, out_dim, kernel, padding=(0, kernel[1] // 2, kernel[2] // 2))
        self.path = ""
        self.past = kernel[0] - 1

    def forward(self, x: Tensor, states: States) -> Tensor:
        if self.past:
            frames = x.shape[2]
            if self.path in states:
                x = torch.cat((states[self.path], x), dim=2)
            # A copy, so that the state does not keep the whole chunk alive.
            states[self.path] = x[:, :, -self.past :].clone()
            x = F.pad(x, (0, 0, 0, 0, self.past + frames - x.shape[2], 0))
        return super().forward(x)


class StridedTimeConv(nn.Conv3d):
    """Halves time: three frames, the last one of the chunk before among them, become one. The stream's first frame
    passes through as it is."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, dim, (3, 1, 1), stride=(2, 1, 1))
        self.path = ""

    def forward(self, x: Tensor, states: States) -> Tensor:
        last = states.get(self.path)
        states[self.path] = x[:, :, -1:].clone()
        return x if last is None else super().forward(torch.cat((last, x), dim=2))


class Downsample(nn.Module):
    """Halve space and then, if ``temporal``, time."""

    def __init__(self, dim: int, temporal: bool) -> None:
        super().__init__()
        self.resample = nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(dim, dim, 3, stride=2))
        self.time_conv = StridedTimeConv(dim) if temporal else None

    def forward(self, x: Tensor, states: States) -> Tensor:
        x = per_frame(self.resample, x)
        return x if self.time_conv is None else self.time_conv(x, states)


class Upsample(nn.Module):
    """Double time, if ``temporal``, and then space. Wan2.1 halves the channels (``out_dim``), Wan2.2 keeps them."""

    def __init__(self, dim: int, out_dim: int, temporal: bool) -> None:
        super().__init__()
        self.resample = nn.Sequential(nn.Upsample(scale_factor=2.0), nn.Conv2d(dim, out_dim, 3, padding=1))
        self.time_conv = CausalConv3d(dim, 2 * dim, (3, 1, 1)) if temporal else None

    def forward(self, x: Tensor, states: States) -> Tensor:
        if self.time_conv is not None:
            x = self._double_time(x, self.time_conv, states)
        return per_frame(self.resample, x)

    @staticmethod
    def _double_time(x: Tensor, time_conv: CausalConv3d, states: States) -> Tensor:
        """Every frame becomes two, except the stream's first one, which stays one and is not remembered."""
        if time_conv.path not in states:
            states[time_conv.path] = x[:, :, :0].clone()
            return x
        pairs = time_conv(x, states).unflatten(1, (2, -1))
        return pairs.permute(0, 2, 3, 1, 4, 5).flatten(2, 3)


class Residual(nn.Module):
    """Two normed, activated causal convolutions beside the identity (a 1x1x1 convolution where the width changes)."""

    def __init__(self, in_dim: int, out_dim: int) -> None:
        super().__init__()
        self.residual = nn.ModuleDict(
            {
                "0": RMSNorm(in_dim),
                "2": CausalConv3d(in_dim, out_dim),
                "3": RMSNorm(out_dim),
                "6": CausalConv3d(out_dim, out_dim),
            }
        )
        self.shortcut = CausalConv3d(in_dim, out_dim, (1, 1, 1)) if in_dim != out_dim else None

    def forward(self, x: Tensor, states: States) -> Tensor:
        y = self.residual["2"](F.silu(self.residual["0"](x)), states)
        y = self.residual["6"](F.silu(self.residual["3"](y)), states)
        return y + (x if self.shortcut is None else self.shortcut(x, states))


class FrameAttention(nn.Module):
    """Single-head attention among the positions of each frame."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = RMSNorm(dim, spatial_axes=2)
        self.to_qkv = nn.Conv2d(dim, 3 * dim, 1)
        self.proj = nn.Conv2d(dim, dim, 1)

    def forward(self, x: Tensor, states: States) -> Tensor:
        return x + per_frame(self._attend, x)

    def _attend(self, frame: Tensor) -> Tensor:
        tokens = self.to_qkv(self.norm(frame)).flatten(2).transpose(1, 2)
        q, k, v = (part.unsqueeze(2) for part in tokens.chunk(3, dim=-1))
        mixed = attention(q, k, v).squeeze(2).transpose(1, 2)
        return self.proj(mixed.unflatten(2, frame.shape[2:]))


class Head(nn.ModuleDict):
    """Norm, activation and a last causal convolution."""

    def __init__(self, in_dim: int, out_dim: int) -> None:
        super().__init__({"0": RMSNorm(in_dim), "2": CausalConv3d(in_dim, out_dim)})

    def forward(self, x: Tensor, states: States) -> Tensor:
        return self["2"](F.silu(self["0"](x)), states)


def middle(dim: int) -> list[nn.Module]:
    """The layers of the coarsest level, between encoder or decoder and latents."""
    return [Residual(dim, dim), FrameAttention(dim), Residual(dim, dim)]
