"""Latents and the low-quality frames to pixels: the tiny decoder, the full one, and the colour correction of both."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from einops import rearrange
from torch import Tensor, nn

from flashdreams.infra.decoder import StreamingDecoder
from flashdreams.recipes.taehv.taehv import BaseMemory, GrowTime, Memories, SoftClamp, conv3x3, run
from flashdreams.recipes.wan.vae import WanVAE, WanVAECache
from flashvsr._colour import METHODS
from flashvsr._encoder import LowQuality, to_video
from flashvsr.config import ColouredVAEConfig, TCDecoderConfig

FOLD = (4, 8, 8)
"""Frames, rows and columns of low-quality pixels that stand beside one latent."""


@dataclass
class TCDecoderCache:
    """Last input of each memory block; empty at the start of a stream."""

    memories: Memories = field(default_factory=dict)


def decoder_layers(config: TCDecoderConfig) -> list[nn.Module]:
    """Latents beside folded frames, ``768 + latent_channels``, to pixels in [0, 1], by their published indices."""
    first, second, third, last = config.dims
    layers: list[nn.Module] = [SoftClamp(), conv3x3(3 * 4 * 8 * 8 + config.latent_channels, first), nn.ReLU()]
    layers += [conv3x3(first, first, bias=False), nn.ReLU()]
    for dim, next_dim, factor in ((first, second, 1), (second, third, 2), (third, last, 2)):
        layers += [*(BaseMemory(dim) for _ in range(3)), nn.Upsample(scale_factor=2.0)]
        layers += [GrowTime(dim, factor), conv3x3(dim, next_dim, bias=False)]
    return [*layers, nn.ReLU(), conv3x3(last, last, bias=False), nn.ReLU(), conv3x3(last, 3)]


class TCDecoder(StreamingDecoder):
    """One frame for the first latent of a stream, four for each later one, as of the VAE it stands in for."""

    config: TCDecoderConfig

    def __init__(self, config: TCDecoderConfig) -> None:
        super().__init__(config)
        self.decoder = nn.ModuleList(decoder_layers(config))
        self.correct = METHODS[config.colour]

    def initialize_cache(self) -> TCDecoderCache:
        return TCDecoderCache()

    def decode(self, latent: Tensor, cache: TCDecoderCache, input: LowQuality | None = None) -> Tensor:
        frames = _frames(input)
        wide = torch.promote_types(latent.dtype, torch.float32)
        video = self.decode_uncoloured(latent, to_video(frames, latent.dtype), cache)
        return self.correct(video, to_video(frames, wide))

    def decode_uncoloured(self, latent: Tensor, frames: Tensor, cache: TCDecoderCache) -> Tensor:
        """:meth:`decode` without colour correction and clamp.

        Args:
            frames: the chunk's low-quality frames ``[B, 3, F, H, W]`` in [-1, 1].

        Raises:
            ValueError: they are not as many, or not as large, as those that the latents decode to.
        """
        begins = not cache.memories
        batch, _, count, height, width = latent.shape
        trim = self.temporal_compression - 1 if begins else 0
        expected = [batch, 3, self.temporal_compression * count - trim, 8 * height, 8 * width]
        if list(frames.shape) != expected:
            raise ValueError(f"low-quality frames are {list(frames.shape)}; these latents take {expected}")
        if begins:
            frames = torch.cat((frames[:, :, :1].expand(-1, -1, trim, -1, -1), frames), dim=2)
        t, r, s = FOLD
        dtype, pieces = next(self.parameters()).dtype, []
        size = self.config.latents_per_pass
        for piece, beside in zip(latent.split(size, dim=2), frames.split(t * size, dim=2), strict=True):
            folded = rearrange(beside, "b c (n t) (h r) (w s) -> b n (c t r s) h w", t=t, r=r, s=s)
            both = torch.cat((folded, piece.transpose(1, 2)), dim=2).to(dtype)
            pieces.append(run(self.decoder, both, cache.memories))
        # The first latent's frames but the last would show what was before the stream: they are not handed out.
        return torch.cat(pieces, dim=1)[:, trim:].transpose(1, 2) * 2 - 1


class ColouredVAE(WanVAE):
    """The full decoder, which sees no low-quality frames; the colour correction does."""

    def __init__(self, config: ColouredVAEConfig) -> None:
        super().__init__(config)
        self.correct = METHODS[config.colour]

    def decode(self, latent: Tensor, cache: WanVAECache, input: LowQuality | None = None) -> Tensor:
        frames = _frames(input)
        video = super().decode(latent, cache)
        return self.correct(video, to_video(frames, torch.promote_types(video.dtype, torch.float32)))


def _frames(input: LowQuality | None) -> Tensor:
    if input is None:
        raise ValueError("this decoder corrects colours by the low-quality frames, which were not given (input)")
    return input.frames
