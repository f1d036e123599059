"""The VAEs of Wan2.1 and 2.2 against diffusers' AutoencoderKLWan, whole and streamed.

The maths is the same; only diffusers' upsampling goes through float32 in any model, which :class:`float64.Float64`
takes out. Differences by construction: it draws a sample of the latent where asked to (the original never does; its
mode is compared), and it does not stream, so that chunks of ours are compared with the whole of theirs.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from diffusers_wan import VAE21, VAE22, vaes
from flashdreams.recipes.wan.keymaps import vae21_from_diffusers, vae22_from_diffusers
from flashdreams.recipes.wan.vae import WanVAE
from flashdreams.recipes.wan.vae_config import WanVAEConfig
from float64 import Float64, assert_same, assert_same_gradients, randn

pytestmark = pytest.mark.ci_cpu

CODECS = {"VAE 2.1": VAE21, "VAE 2.2": VAE22}
CUTS = {"whole": [4], "1 + 3": [1, 3], "2 + 1 + 1": [2, 1, 1]}
"""Latent frames per call."""
LATENT = randn(1, 4, 4, 2, 3)


def video(config: WanVAEConfig) -> Tensor:
    size = config.spatial_compression
    return (0.5 * randn(1, 3, 13, size, 2 * size)).tanh()


def statistics(config: WanVAEConfig) -> tuple[Tensor, Tensor]:
    mean, std = (torch.tensor(x, dtype=torch.float64) for x in (config.latents_mean, config.latents_std))
    return mean[:, None, None, None], std[:, None, None, None]


def their_latent(theirs, config: WanVAEConfig) -> Tensor:
    mean, std = statistics(config)
    with Float64():
        return (theirs.encode(video(config)).latent_dist.mode() - mean) / std


def their_video(theirs, config: WanVAEConfig) -> Tensor:
    mean, std = statistics(config)
    with Float64():
        return theirs.decode(LATENT * std + mean).sample


def encode(ours: WanVAE, cuts: list[int]) -> Tensor:
    cache = ours.initialize_cache()
    sizes = [4 * latents - 3 * (i == 0) for i, latents in enumerate(cuts)]
    return torch.cat([ours.encode(chunk, cache) for chunk in video(ours.config).split(sizes, dim=2)], dim=2)


def decode(ours: WanVAE, cuts: list[int]) -> Tensor:
    cache = ours.initialize_cache()
    return torch.cat([ours.decode(chunk, cache) for chunk in LATENT.split(cuts, dim=2)], dim=2)


@pytest.mark.parametrize("name", CODECS)
@torch.no_grad()
def test_encode_and_decode_in_any_chunks(name: str):
    config = CODECS[name]
    ours, theirs = vaes(config)
    latent, pixels = their_latent(theirs, config), their_video(theirs, config)
    assert pixels.shape[2] == 13 and pixels.abs().max() < 1, "so that clamping hides nothing"
    for cut, sizes in CUTS.items():
        assert_same(f"{name} encode, {cut}", encode(ours, sizes), latent)
        assert_same(f"{name} decode, {cut}", decode(ours, sizes), pixels)


@pytest.mark.parametrize("name", CODECS)
@torch.no_grad()
def test_a_single_image(name: str):
    config = CODECS[name]
    ours, theirs = vaes(config)
    image, (mean, std) = video(config)[:, :, :1], statistics(config)
    with Float64():
        latent = (theirs.encode(image).latent_dist.mode() - mean) / std
        pixels = theirs.decode(latent * std + mean).sample
    got = ours.encode(image, ours.initialize_cache())
    assert_same(f"{name} encode, one image", got, latent)
    assert_same(f"{name} decode, one image", ours.decode(got, ours.initialize_cache()), pixels)


@pytest.mark.parametrize(
    ("name", "rename"), list(zip(CODECS, (vae21_from_diffusers, vae22_from_diffusers), strict=True))
)
def test_gradients(name: str, rename):
    config = CODECS[name]
    ours, theirs = vaes(config)
    got, want = encode(ours, [4]), their_latent(theirs, config)
    pixels = decode(ours, [4]), their_video(theirs, config)
    # One number per side that everything goes into: latents and pixels have separate weights.
    got, want = (torch.cat((a.flatten(), b.flatten())) for a, b in zip((got, want), pixels, strict=True))
    assert_same_gradients(name, got, want, ours, theirs, rename)
