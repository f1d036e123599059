"""The causal video VAE of Wan2.1 (``wan/modules/vae.py``), streamed both ways.

``1 + 4n`` frames correspond to ``1 + n`` latents, eight times smaller in height and width. The first frame stands
alone; after it the encoder takes four frames at a time and the decoder gives four per latent. Both always work in
these steps, whatever the caller's chunks are, so a streamed clip equals the whole one bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flashdreams.infra.decoder import VideoCodec
from flashdreams.recipes.wan.keymaps import VAE21_FROM_DIFFUSERS
from flashdreams.recipes.wan.vae_blocks import (
    CausalConv3d,
    Downsample,
    Head,
    Residual,
    States,
    Upsample,
    middle,
    name_states,
)
from flashdreams.recipes.wan.vae_config import WanVAEConfig


@dataclass
class WanVAECache:
    """What one stream remembers, per direction; empty before its first frame or latent."""

    encoder: States = field(default_factory=dict)
    decoder: States = field(default_factory=dict)


class Encoder(nn.Module):
    """Frames ``[B, 3, 1 or 4, H, W]`` -> moments ``[B, 2 * z_dim, 1, H/8, W/8]``."""

    def __init__(self, config: WanVAEConfig) -> None:
        super().__init__()
        dims = [config.dim * multiple for multiple in (1, *config.dim_mult)]
        self.conv1 = CausalConv3d(3, dims[0])
        layers: list[nn.Module] = []
        for level, (in_dim, out_dim) in enumerate(pairwise(dims)):
            layers.append(Residual(in_dim, out_dim))
            layers.extend(Residual(out_dim, out_dim) for _ in range(config.num_res_blocks - 1))
            if level < len(config.temporal_downsample):
                layers.append(Downsample(out_dim, config.temporal_downsample[level]))
        self.downsamples = nn.ModuleList(layers)
        self.middle = nn.ModuleList(middle(dims[-1]))
        self.head = Head(dims[-1], 2 * config.z_dim)

    def forward(self, x: Tensor, states: States) -> Tensor:
        x = self.conv1(x, states)
        for layer in (*self.downsamples, *self.middle, self.head):
            x = layer(x, states)
        return x


class Decoder(nn.Module):
    """Latent ``[B, z_dim, 1, h, w]`` -> frames ``[B, 3, 1 or 4, 8h, 8w]``."""

    def __init__(self, config: WanVAEConfig) -> None:
        super().__init__()
        dims = [config.dim * multiple for multiple in reversed(config.dim_mult)]
        temporal_upsample = config.temporal_downsample[::-1]
        self.conv1 = CausalConv3d(config.z_dim, dims[0])
        self.middle = nn.ModuleList(middle(dims[0]))
        layers: list[nn.Module] = []
        in_dim = dims[0]
        for level, out_dim in enumerate(dims):
            layers.append(Residual(in_dim, out_dim))
            layers.extend(Residual(out_dim, out_dim) for _ in range(config.num_res_blocks))
            if level < len(temporal_upsample):
                in_dim = out_dim // 2
                layers.append(Upsample(out_dim, in_dim, temporal_upsample[level]))
        self.upsamples = nn.ModuleList(layers)
        self.head = Head(dims[-1], 3)

    def forward(self, x: Tensor, states: States) -> Tensor:
        x = self.conv1(x, states)
        for layer in (*self.middle, *self.upsamples, self.head):
            x = layer(x, states)
        return x


class WanVAE(VideoCodec):
    """Video in [-1, 1] <-> normalised latents."""

    config: WanVAEConfig
    layouts: ClassVar = {"diffusers": VAE21_FROM_DIFFUSERS}
    encoder_type: type[nn.Module] = Encoder
    decoder_type: type[nn.Module] = Decoder

    def __init__(self, config: WanVAEConfig) -> None:
        super().__init__(config)
        self.encoder = self.encoder_type(config)
        self.conv1 = nn.Conv3d(2 * config.z_dim, 2 * config.z_dim, 1)
        self.conv2 = nn.Conv3d(config.z_dim, config.z_dim, 1)
        self.decoder = self.decoder_type(config)
        name_states(self)

    @property
    def compiled_parts(self) -> Sequence[nn.Module]:
        """The decoder: four shapes in a stream, while its states fill."""
        return (self.decoder,)

    def initialize_cache(self) -> WanVAECache:
        return WanVAECache()

    def encode(self, video: Tensor, cache: WanVAECache) -> Tensor:
        """Video ``[B, 3, F, H, W]`` in [-1, 1] -> mean of the latent distribution, normalised, in at least float32.

        Raises:
            ValueError: ``H`` or ``W`` is no multiple of the spatial compression; or ``F`` is not ``1 + 4n`` in the
                first call of a stream, a positive multiple of 4 in the later ones.
        """
        step, cell = self.temporal_compression, self.spatial_compression
        frames, height, width = video.shape[2:]
        if height % cell or width % cell:
            raise ValueError(f"video is {height}x{width} (height x width); both must be multiples of {cell}")
        start = 0 if cache.encoder else 1
        if frames < 1 or (frames - start) % step:
            expected = f"1 + a multiple of {step} in the first" if start else f"a multiple of {step} in a later"
            raise ValueError(f"video has {frames} frames; expected {expected} call of a stream")
        pieces = video[:, :, :start], *video[:, :, start:].split(step, dim=2)
        return torch.cat([self._encode_piece(piece, cache.encoder) for piece in pieces if piece.shape[2]], dim=2)

    def decode(self, latent: Tensor, cache: WanVAECache, input: Any = None) -> Tensor:
        """Normalised latents ``[B, C, T, h, w]``, any number, -> video ``[B, 3, frames, H, W]`` in [-1, 1]."""
        return self.decode_unclamped(latent, cache).clamp_(-1, 1)

    def decode_unclamped(self, latent: Tensor, cache: WanVAECache) -> Tensor:
        """:meth:`decode` before its clamp to [-1, 1].

        Raises:
            ValueError: there are no latents, or their channels are not this VAE's.
        """
        if latent.shape[1] != self.config.z_dim or latent.shape[2] < 1:
            raise ValueError(
                f"latent has shape {list(latent.shape)}; expected [B, {self.config.z_dim}, T, h, w] with T >= 1"
            )
        return torch.cat([self._decode_one(one, cache.decoder) for one in latent.split(1, dim=2)], dim=2)

    def _encode_piece(self, video: Tensor, states: States) -> Tensor:
        moments = self.conv1(self.encoder(video.to(self.conv1.weight.dtype), states))
        mean, std = self._statistics(moments)
        return (moments.chunk(2, dim=1)[0] - mean) / std

    def _decode_one(self, latent: Tensor, states: States) -> Tensor:
        mean, std = self._statistics(latent)
        raw = (latent * std + mean).to(self.conv2.weight.dtype)
        return self.decoder(self.conv2(raw), states)

    def _statistics(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the raw latents, ``[C, 1, 1, 1]``."""
        wide = torch.promote_types(like.dtype, torch.float32)
        both = torch.tensor([self.config.latents_mean, self.config.latents_std], dtype=wide, device=like.device)
        mean, std = both[:, :, None, None, None].unbind()
        return mean, std
