"""The low-quality clip to tokens of the network's width: two convolutions over space and time, and a linear layer.

The clip is taken in slices: its first frame alone, then four frames at a time, each of which gives the tokens of one
latent frame. The two published versions have the same weights by name and differ in what a slice sees before itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashvsr.config import LowQualityEncoderConfig

FOLD = 16
"""Pixels, in height and width, that one token stands for."""
SLICE = 4
"""Frames of a slice."""
PAST = 2
"""Frames that a convolution sees before a slice."""


@dataclass
class ProjectionCache:
    """What one stream remembers: the last two inputs of each convolution; ``None`` before its first frame."""

    first: Tensor | None = None
    second: Tensor | None = None


class ChannelNorm(nn.Module):
    """Root-mean-square norm over the channels of ``[B, C, T, h, w]``."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(dim, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=1, eps=1e-12) * math.sqrt(x.shape[1]) * self.gamma


class LowQualityProjection(nn.Module):
    """Frames ``[B, 3, F, H, W]`` in [-1, 1] -> tokens ``[B, T, rows * columns, dim]``, with the published key names."""

    def __init__(self, config: LowQualityEncoderConfig) -> None:
        super().__init__()
        self.carries_past = config.carries_past
        first, second = config.hidden_dims
        self.conv1 = nn.Conv3d(3 * FOLD**2, first, (4, 3, 3), stride=(2, 1, 1))
        self.norm1 = ChannelNorm(first)
        self.conv2 = nn.Conv3d(first, second, (4, 3, 3), stride=(2, 1, 1))
        self.norm2 = ChannelNorm(second)
        self.linear_layers = nn.ModuleList([nn.Linear(second, config.dim)])

    def begin(self, frame: Tensor, cache: ProjectionCache) -> None:
        """Take the first frame ``[B, 3, 1, H, W]`` of a clip, which gives no tokens but stands before the first slice.

        In version 1.0, which carries nothing over, it does not reach any token.
        """
        if not self.carries_past:
            return
        past = self._fold(frame).expand(-1, -1, SLICE + PAST, -1, -1)
        cache.first = past[:, :, -PAST:].clone()
        cache.second = self._first(past)

    def forward(self, frames: Tensor, cache: ProjectionCache) -> Tensor:
        """Tokens of slices of four frames ``[B, 3, 4 T, H, W]``."""
        batch, x = frames.shape[0], self._fold(frames)
        if self.carries_past:
            if cache.first is None or cache.second is None:
                raise ValueError("the first frame of a clip comes alone: begin() before the first slice")
            x = torch.cat((cache.first, x), dim=2)
            cache.first = x[:, :, -PAST:].clone()
            x = torch.cat((cache.second, self._first(x)), dim=2)
            cache.second = x[:, :, -PAST:].clone()
        else:
            x = self._apart(x, SLICE)
            x = self._first(torch.cat((x[:, :, -PAST:], x), dim=2))
            x = torch.cat((x, x), dim=2)
        x = F.silu(self.norm2(self.conv2(_border(x))))
        if not self.carries_past:
            x = x.unflatten(0, (batch, -1)).squeeze(3).transpose(1, 2)
        return self.linear_layers[0](x.flatten(3).permute(0, 2, 3, 1))

    def _first(self, x: Tensor) -> Tensor:
        """The first half: ``[B, 768, 2 n + 2, h, w] -> [B, C, n, h, w]``."""
        return F.silu(self.norm1(self.conv1(_border(x))))

    @staticmethod
    def _fold(frames: Tensor) -> Tensor:
        """``[B, 3, F, H, W] -> [B, 768, F, H/16, W/16]``, channels in the order colour, row, column."""
        return F.pixel_unshuffle(frames.transpose(1, 2), FOLD).transpose(1, 2)

    @staticmethod
    def _apart(x: Tensor, length: int) -> Tensor:
        """Stretches of ``length`` frames as samples: ``[B, C, n * length, h, w] -> [B * n, C, length, h, w]``."""
        return x.unflatten(2, (-1, length)).transpose(1, 2).flatten(0, 1)


def _border(x: Tensor) -> Tensor:
    """One more row and column on each side, repeated."""
    return F.pad(x, (1, 1, 1, 1, 0, 0), mode="replicate")
