"""TAEHV: encode and decode, all frames at once and streamed one latent at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from flashdreams.recipes.taehv.config import TAEHVConfig
from flashdreams.recipes.taehv.taehv import TAEHV
from golden import Golden


def matches(golden: Golden) -> bool:
    return golden.repository.startswith("madebyollin/taehv") and golden.files == ("taehv.py",)


def run(golden: Golden) -> Iterator[tuple[str, Tensor]]:
    """The file has frames in [0, 1], ``[B, T, C, H, W]``; ours are in [-1, 1] with time third."""
    codec: TAEHV = TAEHVConfig(
        latent_channels=golden.config["latent_channels"], patch_size=golden.config["patch_size"]
    ).setup()
    codec.load_state_dict(golden.weights["model"])
    video, latents = 2 * golden.inputs["frames"].transpose(1, 2) - 1, golden.inputs["latents"].transpose(1, 2)
    yield "encoded", codec.encode(video, codec.initialize_cache()).transpose(1, 2)
    yield "decoded_unclamped", (codec.decode_unclamped(latents, codec.initialize_cache()).transpose(1, 2) + 1) / 2

    cache, step = codec.initialize_cache(), codec.temporal_compression
    streamed = [codec.encode(chunk, cache) for chunk in video.split(step, dim=2)]
    yield "encoded", torch.cat(streamed, dim=2).transpose(1, 2)
    streamed = [codec.decode_unclamped(latent, cache) for latent in latents.split(1, dim=2)]
    yield "decoded_unclamped", (torch.cat(streamed, dim=2).transpose(1, 2) + 1) / 2
