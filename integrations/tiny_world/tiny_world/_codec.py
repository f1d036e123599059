"""A folded causal video codec: 16x in space, 4x in time, streamed exactly.

Four frames and 2x2 pixels are folded into 48 channels, so every convolution runs at latent rate.
The first frame of a stream is repeated three times in front: 1 + 4n frames <-> 1 + n latents.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashdreams.infra.decoder import VideoCodec
from tiny_world.config import TinyWorldCodecConfig

State = dict[str, Tensor]
"""Last latent-rate feature ``[B, 1, C, h, w]`` of each temporal block, by name; empty at the start of a stream."""

FOLD = 4 * 2 * 2 * 3


def fold(video: Tensor) -> Tensor:
    """``[B, 3, 4T, H, W]`` -> ``[B, T, 48, H/2, W/2]``."""
    b, _, frames, h, w = video.shape
    x = video.reshape(b, 3, frames // 4, 4, h // 2, 2, w // 2, 2)
    return x.permute(0, 2, 3, 1, 5, 7, 4, 6).reshape(b, frames // 4, FOLD, h // 2, w // 2)


def unfold(x: Tensor) -> Tensor:
    """Inverse of :func:`fold`."""
    b, t, _, h, w = x.shape
    x = x.reshape(b, t, 4, 3, 2, 2, h, w).permute(0, 3, 1, 2, 6, 4, 7, 5)
    return x.reshape(b, 3, 4 * t, 2 * h, 2 * w)


class FrameConv(nn.Conv2d):
    """A 2-D convolution of every latent frame: ``[B, T, C, h, w]`` -> ``[B, T, C', h, w]``."""

    def __init__(self, c_in: int, c_out: int, kernel: int = 3) -> None:
        super().__init__(c_in, c_out, kernel, padding=kernel // 2)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x.flatten(0, 1))
        return y.view(*x.shape[:2], *y.shape[1:])


class Res(nn.Module):
    """x + conv(silu(conv(silu(x)))); the second convolution starts at zero."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = FrameConv(width, width)
        self.conv2 = FrameConv(width, width)
        for parameter in self.conv2.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor, state: State) -> Tensor:
        return x + self.conv2(F.silu(self.conv1(F.silu(x))))


class CausalRes(nn.Module):
    """A :class:`Res` whose first convolution also sees the previous latent frame (zeros at the start)."""

    def __init__(self, width: int, name: str) -> None:
        super().__init__()
        self.name = name
        self.conv1 = FrameConv(2 * width, width)
        self.conv2 = FrameConv(width, width)
        for parameter in self.conv2.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor, state: State) -> Tensor:
        now = F.silu(x)
        last = state.get(self.name)
        if last is None:
            last = torch.zeros_like(now[:, :1])
        state[self.name] = now[:, -1:]
        before = torch.cat([last, now[:, :-1]], dim=1)
        return x + self.conv2(F.silu(self.conv1(torch.cat([before, now], dim=2))))


class Down(nn.Module):
    """Halve the grid: 2x2 cells into channels, then a 1x1 convolution."""

    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__()
        self.conv = FrameConv(4 * c_in, c_out, 1)

    def forward(self, x: Tensor, state: State) -> Tensor:
        return self.conv(F.pixel_unshuffle(x, 2))


class Up(nn.Module):
    """Double the grid: a 1x1 convolution, then channels into 2x2 cells."""

    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__()
        self.conv = FrameConv(c_in, 4 * c_out, 1)

    def forward(self, x: Tensor, state: State) -> Tensor:
        return F.pixel_shuffle(self.conv(x), 2)


class Encoder(nn.Module):
    """Folded video ``[B, T, 48, H/2, W/2]`` -> raw latent ``[B, T, C, H/16, W/16]``."""

    def __init__(self, channels: int, widths: tuple[int, int, int, int]) -> None:
        super().__init__()
        w0, w1, w2, w3 = widths
        self.stem = FrameConv(FOLD, w0)
        self.body = nn.ModuleList(
            [Down(w0, w1), Res(w1), Down(w1, w2), CausalRes(w2, "mid"), Down(w2, w3), CausalRes(w3, "deep")]
        )
        self.head = FrameConv(w3, channels, 1)

    def forward(self, x: Tensor, state: State) -> Tensor:
        x = self.stem(x)
        for block in self.body:
            x = block(x, state)
        return self.head(F.silu(x))


class Decoder(nn.Module):
    """Raw latent ``[B, T, C, H/16, W/16]`` -> folded video ``[B, T, 48, H/2, W/2]``."""

    def __init__(self, channels: int, widths: tuple[int, int, int, int]) -> None:
        super().__init__()
        w0, w1, w2, w3 = widths
        self.stem = FrameConv(channels, w3)
        self.body = nn.ModuleList(
            [CausalRes(w3, "deep"), Up(w3, w2), CausalRes(w2, "mid"), Up(w2, w1), Res(w1), Res(w1), Up(w1, w0), Res(w0)]
        )
        self.head = FrameConv(w0, FOLD)

    def forward(self, x: Tensor, state: State) -> Tensor:
        x = self.stem(x)
        for block in self.body:
            x = block(x, state)
        return self.head(F.silu(x))


@dataclass
class CodecCache:
    """State of one stream: temporal features of both directions, and how much has gone through."""

    encoder: State = field(default_factory=dict)
    decoder: State = field(default_factory=dict)
    encoded: int = 0
    decoded: int = 0


class TinyWorldCodec(VideoCodec):
    """Encoder and decoder behind the streaming contract; any height and width that are multiples of 16.

    Latents have unit variance per channel: the training statistics are folded into the encoder's last convolution.
    """

    spatial_compression = 16
    temporal_compression = 4

    def __init__(self, config: TinyWorldCodecConfig) -> None:
        super().__init__(config)
        self.latent_channels = config.channels
        self.encoder = Encoder(config.channels, config.widths)
        self.decoder = Decoder(config.channels, config.widths)

    def initialize_cache(self) -> CodecCache:
        return CodecCache()

    def encode(self, video: Tensor, cache: CodecCache) -> Tensor:
        """``[B, 3, 1+4n, H, W]`` (later calls: ``4n`` frames) in [-1, 1] -> ``[B, 12, 1+n, H/16, W/16]``."""
        _, _, frames, height, width = video.shape
        lead = 1 if cache.encoded == 0 else 0
        if frames < 1 or frames % 4 != lead:
            raise ValueError(f"{frames} frames; expected {'1 + ' * lead}4n at this point of the stream")
        if height % 16 or width % 16:
            raise ValueError(f"video is {width}x{height}; expected multiples of 16")
        if lead:
            video = torch.cat([video[:, :, :1].expand(-1, -1, 3, -1, -1), video], dim=2)
        latent = self.encoder(fold(video.to(self.encoder.head.weight.dtype)), cache.encoder)
        cache.encoded += latent.shape[1]
        return latent.transpose(1, 2)

    def decode(self, latent: Tensor, cache: CodecCache, input: Any = None) -> Tensor:
        """``[B, 12, T, h, w]`` -> ``[B, 3, 4T, 16h, 16w]`` in [-1, 1], three frames fewer at the start of a stream."""
        x = latent.transpose(1, 2).to(self.decoder.head.weight.dtype)
        video = unfold(self.decoder(x, cache.decoder)).clamp(-1, 1)
        first = cache.decoded == 0
        cache.decoded += latent.shape[2]
        return video[:, :, 3:] if first else video
