"""TAEHV: tiny video codecs for the latents of large ones (madebyollin/taehv), streamed both ways.

A codec is two flat lists of layers with the index names of the published files. Layers work on single frames, except
memory blocks, which also see the frame before, and those that pool or grow frames in time. The same lists run over a
whole clip or a piece of it: all that a piece needs of the past is one frame per memory block, the stream's state.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashdreams.infra.decoder import VideoCodec
from flashdreams.recipes.taehv.config import TAEHVConfig

Memories = dict[int, Tensor]
"""Last input ``[B, C, H, W]`` of each memory block of one stream, by its place in the list; empty at the start."""


@dataclass
class TAEHVCache:
    """What one stream remembers, per direction."""

    encoder: Memories = field(default_factory=dict)
    decoder: Memories = field(default_factory=dict)
    encoder_ended: bool = False
    """The encoder was given frames that did not fill a latent, and filled it with copies of the last one."""


class Memory(nn.Module):
    """A layer that looks at a frame and the one before it."""

    def forward(self, x: Tensor, past: Tensor) -> Tensor:
        """``past`` holds, for every frame of ``x``, the frame before it; zeros before the first of a stream."""
        raise NotImplementedError(type(self).__name__)


class BaseMemory(Memory):
    """Three 3x3 convolutions beside the identity."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            conv3x3(2 * dim, dim),
            nn.ReLU(),
            conv3x3(dim, dim),
            nn.ReLU(),
            conv3x3(dim, dim),
        )

    def forward(self, x: Tensor, past: Tensor) -> Tensor:
        return F.relu(self.conv(torch.cat((x, past), dim=1)) + x)


class SuperMemory(Memory):
    """A wide depthwise and two pointwise convolutions beside the identity."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(2 * dim, 2 * dim, 7, padding=3, groups=2 * dim, bias=False),
            nn.Conv2d(2 * dim, 4 * dim, 1),
            nn.ReLU(),
            nn.Conv2d(4 * dim, dim, 1, bias=False),
        )

    def forward(self, x: Tensor, past: Tensor) -> Tensor:
        return x + self.conv(torch.cat((x, past), dim=1))


class PoolTime(nn.Module):
    """``factor`` frames, stacked on the channels oldest first, become one. Time is part of the batch axis."""

    def __init__(self, dim: int, factor: int) -> None:
        super().__init__()
        self.factor = factor
        self.conv = nn.Conv2d(factor * dim, dim, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.unflatten(0, (-1, self.factor)).flatten(1, 2))


class GrowTime(nn.Module):
    """One frame becomes ``factor``. Time is part of the batch axis."""

    def __init__(self, dim: int, factor: int) -> None:
        super().__init__()
        self.factor = factor
        self.conv = nn.Conv2d(dim, factor * dim, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).unflatten(1, (self.factor, -1)).flatten(0, 1)


class SoftClamp(nn.Module):
    """Latents into (-3, 3)."""

    def forward(self, x: Tensor) -> Tensor:
        return 3 * torch.tanh(x / 3)


def conv3x3(in_dim: int, out_dim: int, stride: int = 1, bias: bool = True) -> nn.Conv2d:
    """The family's convolution: the size stays, or halves."""
    return nn.Conv2d(in_dim, out_dim, 3, stride=stride, padding=1, bias=bias)


def encoder_layers(config: TAEHVConfig) -> list[nn.Module]:
    """Frames of ``3 * patch_size**2`` channels to latents, an eighth the size."""
    layers: list[nn.Module] = [conv3x3(3 * config.patch_size**2, 64), nn.ReLU()]
    for factor in config.encoder_time:
        layers += [PoolTime(64, factor), conv3x3(64, 64, stride=2, bias=False), *(BaseMemory(64) for _ in range(3))]
    return [*layers, conv3x3(64, config.latent_channels)]


def decoder_layers(config: TAEHVConfig) -> list[nn.Module]:
    """Latents to frames of ``3 * patch_size**2`` channels, eight times the size."""
    dims = (256, 128, 64, 64)
    layers: list[nn.Module] = [SoftClamp(), conv3x3(config.latent_channels, dims[0]), nn.ReLU()]
    for dim, next_dim, factor in zip(dims, dims[1:], config.decoder_time, strict=False):
        layers += [*(BaseMemory(dim) for _ in range(3)), nn.Upsample(scale_factor=2.0)]
        layers += [GrowTime(dim, factor), conv3x3(dim, next_dim, bias=False)]
    return [*layers, nn.ReLU(), conv3x3(dims[-1], 3 * config.patch_size**2)]


def super_decoder_layers(config: TAEHVConfig) -> list[nn.Module]:
    """:func:`decoder_layers` of the ``super`` layout."""
    dims = (512, 256, 128, 64)
    layers: list[nn.Module] = [nn.Conv2d(config.latent_channels, dims[0], 1, bias=False)]
    for dim, next_dim, factor in zip(dims, dims[1:], config.decoder_time, strict=False):
        layers += [*(SuperMemory(dim) for _ in range(3)), conv3x3(dim, 4 * next_dim), nn.ReLU(), nn.PixelShuffle(2)]
        layers += [GrowTime(next_dim, factor)]
    return [*layers, conv3x3(dims[-1], 3 * config.patch_size**2)]


def run(layers: nn.ModuleList, frames: Tensor, memories: Memories) -> Tensor:
    """Pass ``[B, T, C, H, W]`` through ``layers``, which continue the stream that ``memories`` belong to."""
    batch, x = frames.shape[0], frames.flatten(0, 1)
    for index, layer in enumerate(layers):
        if not isinstance(layer, Memory):
            x = layer(x)
            continue
        sequence = x.unflatten(0, (batch, -1))
        last = memories.get(index)
        first = torch.zeros_like(sequence[:, 0]) if last is None else last
        memories[index] = sequence[:, -1].clone()  # a copy, so that the state does not keep the whole piece alive
        x = layer(x, torch.cat((first[:, None], sequence[:, :-1]), dim=1).flatten(0, 1))
    return x.unflatten(0, (batch, -1))


class TAEHV(VideoCodec):
    """Video in [-1, 1] <-> normalised latents of the VAE it stands in for.

    The decoder gives the frames of that VAE: one for the first latent of a stream, several for each later one. The
    encoder does not: it makes a latent of every ``temporal_compression`` frames, the first ones included.
    """

    config: TAEHVConfig

    def __init__(self, config: TAEHVConfig) -> None:
        super().__init__(config)
        self.encoder = nn.ModuleList(encoder_layers(config))
        self.decoder = nn.ModuleList((super_decoder_layers if config.layout == "super" else decoder_layers)(config))

    def initialize_cache(self) -> TAEHVCache:
        return TAEHVCache()

    def encode(self, video: Tensor, cache: TAEHVCache) -> Tensor:
        """Video ``[B, 3, F, H, W]`` in [-1, 1] -> latents ``[B, C, ceil(F / temporal_compression), h, w]``.

        If ``F`` is no multiple of the temporal compression, the last frame is repeated until it is, which ends the
        stream; so every call but the last takes a multiple.

        Raises:
            ValueError: no frames, a size that is no multiple of the spatial compression, or an ended stream.
        """
        step, cell = self.temporal_compression, self.spatial_compression
        count, height, width = video.shape[2:]
        if height % cell or width % cell:
            raise ValueError(f"video is {height}x{width} (height x width); both must be multiples of {cell}")
        if count < 1:
            raise ValueError("video has 0 frames; expected at least 1")
        if cache.encoder_ended:
            raise ValueError(
                f"this stream has ended: an earlier call gave it frames that were no multiple of {step}, and its last "
                "frame was repeated; start a new stream, or give every call but the last a multiple"
            )
        cache.encoder_ended = bool(count % step)
        frames = F.pixel_unshuffle(self._cast(video).transpose(1, 2) * 0.5 + 0.5, self.config.patch_size)
        frames = torch.cat((frames, frames[:, -1:].expand(-1, -count % step, -1, -1, -1)), dim=1)
        pieces = frames.split(step * self.config.latents_per_pass, dim=1)
        return torch.cat([run(self.encoder, piece, cache.encoder) for piece in pieces], dim=1).transpose(1, 2)

    def decode(self, latent: Tensor, cache: TAEHVCache, input: Any = None) -> Tensor:
        return self.decode_unclamped(latent, cache).clamp_(-1, 1)

    def decode_unclamped(self, latent: Tensor, cache: TAEHVCache) -> Tensor:
        """:meth:`decode` before its clamp to [-1, 1].

        Raises:
            ValueError: there are no latents, or their channels are not this codec's.
        """
        channels = self.config.latent_channels
        if latent.shape[1] != channels or latent.shape[2] < 1:
            raise ValueError(f"latent has shape {list(latent.shape)}; expected [B, {channels}, T, h, w] with T >= 1")
        # The first latent's frames but the last would show what was before the stream: they are not handed out.
        trim = 0 if cache.decoder else self.temporal_compression - 1
        pieces = self._cast(latent).transpose(1, 2).split(self.config.latents_per_pass, dim=1)
        frames = torch.cat([run(self.decoder, piece, cache.decoder) for piece in pieces], dim=1)[:, trim:]
        return F.pixel_shuffle(frames, self.config.patch_size).transpose(1, 2) * 2 - 1

    def _cast(self, x: Tensor) -> Tensor:
        return x.to(next(self.parameters()).dtype)


def keep_last_rows(state: Mapping[str, Tensor], factors: tuple[int, ...] = (1, 2, 2)) -> dict[str, Tensor]:
    """State-dict transform: cut the decoder's layers that grow time down to ``factors``.

    Published files may hold rows for more new frames than a decoder makes; the last ones are those to keep.
    """
    names = sorted(
        (name for name in state if re.fullmatch(r"decoder\.\d+\.conv\.weight", name)),
        key=lambda name: int(name.split(".")[1]),
    )
    rows = {name: factor * state[name].shape[1] for name, factor in zip(names, factors, strict=True)}
    return {name: weight[-rows[name] :] if len(weight) > rows.get(name, len(weight)) else weight
            for name, weight in state.items()}  # fmt: skip
