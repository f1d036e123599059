"""The causal video VAE of Wan2.2-TI2V-5B (``wan/modules/vae2_2.py``): that of Wan2.1, with shortcuts around each level.

Pixels go in and come out in patches of 2 x 2, so a latent is sixteen times smaller in height and width. Beside every
level that changes the size there is a shortcut without weights, which averages samples or repeats them.
"""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar

import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from flashdreams.config import ConfigError
from flashdreams.recipes.wan.keymaps import VAE22_FROM_DIFFUSERS
from flashdreams.recipes.wan.vae import WanVAE
from flashdreams.recipes.wan.vae_blocks import CausalConv3d, Downsample, Head, Residual, States, Upsample, middle
from flashdreams.recipes.wan.vae_config import WanVAE22Config


class Down(nn.Module):
    """A level of the encoder: residual blocks and perhaps a downsampling, beside an average.

    ``time`` and ``space`` are the factors by which it makes the video smaller.
    """

    def __init__(self, in_dim: int, out_dim: int, blocks: int, time: int, space: int) -> None:
        super().__init__()
        self.out_dim, self.time, self.space = out_dim, time, space
        check_shortcut(in_dim * time * space**2, out_dim)
        layers = [Residual(in_dim, out_dim), *(Residual(out_dim, out_dim) for _ in range(blocks - 1))]
        self.downsamples = nn.ModuleList([*layers, Downsample(out_dim, time == 2)] if space == 2 else layers)

    def forward(self, x: Tensor, states: States) -> Tensor:
        shortcut = average_down(x, self.out_dim, self.time, self.space)
        for layer in self.downsamples:
            x = layer(x, states)
        return x + shortcut


class Up(nn.Module):
    """A level of the decoder: residual blocks and an upsampling, beside a repetition; the finest level has neither.

    ``time`` and ``space`` are the factors by which it makes the video larger.
    """

    def __init__(self, in_dim: int, out_dim: int, blocks: int, time: int, space: int) -> None:
        super().__init__()
        self.out_dim, self.time, self.space = out_dim, time, space
        layers = [Residual(in_dim, out_dim), *(Residual(out_dim, out_dim) for _ in range(blocks - 1))]
        if space == 2:
            check_shortcut(out_dim * time * space**2, in_dim)
            layers.append(Upsample(out_dim, out_dim, time == 2))
        self.upsamples = nn.ModuleList(layers)

    def forward(self, x: Tensor, states: States, first: bool) -> Tensor:
        """``first``: the chunk is the first of its stream, whose frame stays one."""
        y = x
        for layer in self.upsamples:
            y = layer(y, states)
        if self.space == 1:
            return y
        shortcut = repeat_up(x, self.out_dim, self.time, self.space)
        return y + shortcut[:, :, self.time - 1 if first else 0 :]


class Encoder(nn.Module):
    """Frames ``[B, 3, 1 or 4, H, W]`` -> moments ``[B, 2 * z_dim, 1, H/16, W/16]``."""

    def __init__(self, config: WanVAE22Config) -> None:
        super().__init__()
        dims = [config.dim * multiple for multiple in (1, *config.dim_mult)]
        self.patch = config.patch_size
        self.conv1 = CausalConv3d(3 * self.patch**2, dims[0])
        self.downsamples = nn.ModuleList(
            Down(in_dim, out_dim, config.num_res_blocks, time, space)
            for (in_dim, out_dim), (time, space) in zip(pairwise(dims), factors(config), strict=True)
        )
        self.middle = nn.ModuleList(middle(dims[-1]))
        self.head = Head(dims[-1], 2 * config.z_dim)

    def forward(self, x: Tensor, states: States) -> Tensor:
        x = self.conv1(to_patches(x, self.patch), states)
        for layer in (*self.downsamples, *self.middle, self.head):
            x = layer(x, states)
        return x


class Decoder(nn.Module):
    """Latent ``[B, z_dim, 1, h, w]`` -> frames ``[B, 3, 1 or 4, 16h, 16w]``."""

    def __init__(self, config: WanVAE22Config) -> None:
        super().__init__()
        multiples = config.dim_mult[::-1]
        dims = [config.decoder_dim * multiple for multiple in (multiples[0], *multiples)]
        ups = [*factors(config)[-2::-1], (1, 1)]  # the sizes between levels, in reverse
        self.patch = config.patch_size
        self.conv1 = CausalConv3d(config.z_dim, dims[0])
        self.middle = nn.ModuleList(middle(dims[0]))
        self.upsamples = nn.ModuleList(
            Up(in_dim, out_dim, config.num_res_blocks + 1, time, space)
            for (in_dim, out_dim), (time, space) in zip(pairwise(dims), ups, strict=True)
        )
        self.head = Head(dims[-1], 3 * self.patch**2)

    def forward(self, x: Tensor, states: States) -> Tensor:
        first = not states
        x = self.conv1(x, states)
        for layer in self.middle:
            x = layer(x, states)
        for level in self.upsamples:
            x = level(x, states, first)
        return from_patches(self.head(x, states), self.patch)


class WanVAE22(WanVAE):
    """Video in [-1, 1] <-> normalised latents."""

    layouts: ClassVar = {"diffusers": VAE22_FROM_DIFFUSERS}
    encoder_type = Encoder
    decoder_type = Decoder


def factors(config: WanVAE22Config) -> list[tuple[int, int]]:
    """By how much each level, from pixels to latents, reduces time and space."""
    return [*((2 if temporal else 1, 2) for temporal in config.temporal_downsample), (1, 1)]


def check_shortcut(samples: int, channels: int) -> None:
    """Raise ConfigError unless each of ``channels`` takes, or is taken by, a whole number of ``samples``."""
    if samples % channels:
        raise ConfigError(
            f"a shortcut has {samples} samples for {channels} channels; choose dim_mult so that the first is a "
            "multiple of the second"
        )


def average_down(x: Tensor, out_dim: int, time: int, space: int) -> Tensor:
    """``[B, C, T, H, W]`` -> ``[B, out_dim, ceil(T / time), H / space, W / space]``: means of consecutive samples of a
    cell, counted channel, time, row, column. Zeros before the first frame fill up the first cell."""
    x = F.pad(x, (0, 0, 0, 0, -x.shape[2] % time, 0))
    samples = rearrange(x, "b c (t a) (h p) (w q) -> b (c a p q) t h w", a=time, p=space, q=space)
    return samples.unflatten(1, (out_dim, -1)).mean(2)


def repeat_up(x: Tensor, out_dim: int, time: int, space: int) -> Tensor:
    """``[B, C, T, H, W]`` -> ``[B, out_dim, T * time, H * space, W * space]``: every channel fills equally many samples
    of the larger cell, counted channel, time, row, column."""
    samples = x.repeat_interleave(out_dim * time * space**2 // x.shape[1], dim=1)
    return rearrange(samples, "b (c a p q) t h w -> b c (t a) (h p) (w q)", a=time, p=space, q=space)


def to_patches(video: Tensor, patch: int) -> Tensor:
    """Stack the pixels of each patch as channels: within a colour by column, then by row."""
    return rearrange(video, "b c t (h q) (w r) -> b (c r q) t h w", q=patch, r=patch)


def from_patches(x: Tensor, patch: int) -> Tensor:
    """Inverse of :func:`to_patches`."""
    return rearrange(x, "b (c r q) t h w -> b c t (h q) (w r)", q=patch, r=patch)
