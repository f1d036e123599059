"""Encode and decode of the Wan2.1 VAE, whole and streamed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

import torch
from torch import Tensor

from flashdreams.recipes.wan.vae import WanVAE
from flashdreams.recipes.wan.vae_config import WanVAEConfig
from golden import Golden


def matches(golden: Golden) -> bool:
    return golden.repository.startswith("Wan-Video/") and golden.files == ("wan/modules/vae.py",)


def run(golden: Golden) -> Iterator[tuple[str, Tensor]]:
    config = golden.config
    vae: WanVAE = WanVAEConfig(
        dim=config["dim"],
        z_dim=config["z_dim"],
        dim_mult=tuple(config["dim_mult"]),
        num_res_blocks=config["num_res_blocks"],
        temporal_downsample=tuple(config["temperal_downsample"]),
        latents_mean=tuple(config["latents_mean"]),
        latents_std=tuple(config["latents_std"]),
    ).setup()
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


def ragged(total: int) -> list[int]:
    """Chunk sizes 1, 2, 1, 2, ... that add up to ``total``."""
    sizes: list[int] = []
    for size in cycle((1, 2)):
        if sum(sizes) == total:
            return sizes
        sizes.append(min(size, total - sum(sizes)))
    raise AssertionError
