"""Encode and decode of the Wan2.1 and Wan2.2 VAEs, whole and streamed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from flashdreams.recipes.wan.vae import WanVAE
from flashdreams.recipes.wan.vae_config import WanVAE22Config, WanVAEConfig
from golden import Golden


def matches(golden: Golden) -> bool:
    return golden.repository.startswith("Wan-Video/") and golden.files in (
        ("wan/modules/vae.py",),
        ("wan/modules/vae2_2.py",),
    )


def run(golden: Golden) -> Iterator[tuple[str, Tensor]]:
    vae: WanVAE = vae_config(golden.config).setup()
    vae.load_state_dict(golden.weights["model"])
    video, latents = golden.inputs["video"], golden.inputs["latents"]
    yield "latent_mean_normalised", vae.encode(video, vae.initialize_cache())
    yield "decoded_unclamped", vae.decode_unclamped(latents, vae.initialize_cache())

    cache, groups = vae.initialize_cache(), ragged(latents.shape[2])
    sizes = [4 * group - 3 * (i == 0) for i, group in enumerate(groups)]
    streamed = [vae.encode(chunk, cache) for chunk in video.split(sizes, dim=2)]
    yield "latent_mean_normalised", torch.cat(streamed, dim=2)
    streamed = [vae.decode_unclamped(chunk, cache) for chunk in latents.split(groups, dim=2)]
    yield "decoded_unclamped", torch.cat(streamed, dim=2)


def vae_config(published: dict[str, Any]) -> WanVAEConfig:
    """Our config with the published values; only the 2.2 VAE has a ``dec_dim``."""
    sizes = {
        "dim": published["dim"],
        "z_dim": published["z_dim"],
        "dim_mult": tuple(published["dim_mult"]),
        "num_res_blocks": published["num_res_blocks"],
        "temporal_downsample": tuple(published["temperal_downsample"]),
        "latents_mean": tuple(published["latents_mean"]),
        "latents_std": tuple(published["latents_std"]),
    }
    if "dec_dim" in published:
        return WanVAE22Config(**sizes, decoder_dim=published["dec_dim"])
    return WanVAEConfig(**sizes)


def ragged(total: int) -> list[int]:
    """Chunk sizes 1, 2, 1, 2, ... that add up to ``total``."""
    sizes: list[int] = []
    for size in cycle((1, 2)):
        if sum(sizes) == total:
            return sizes
        sizes.append(min(size, total - sum(sizes)))
    raise AssertionError
