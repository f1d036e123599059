"""The Wan2.2 VAE: published keys, exact streaming, its shortcuts by hand. (diffusers' numbers: ``tests/parity``.)"""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flashdreams.config import ConfigError
from flashdreams.recipes.wan.vae22 import WanVAE22, average_down, from_patches, repeat_up, to_patches
from flashdreams.recipes.wan.vae_config import WanVAE22Config

pytestmark = pytest.mark.ci_cpu

DATA = Path(__file__).parent / "data"
SMALL = WanVAE22Config(
    dim=8, decoder_dim=4, z_dim=4, num_res_blocks=1, latents_mean=(0.1, -0.2, 0.3, 0.0), latents_std=(1.5, 0.5, 2, 1)
)


def filled(config: WanVAE22Config, seed: int = 0) -> WanVAE22:
    """A VAE whose every weight is random, norm gains and biases included."""
    vae = WanVAE22(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, weight in vae.named_parameters():
        spread = 1 / weight[0].numel() ** 0.5 if weight.ndim > 1 and "gamma" not in name else 0.1
        weight.copy_(torch.randn(weight.shape, generator=generator) * spread + ("gamma" in name))
    return vae


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1


@pytest.fixture(scope="module")
def vae() -> WanVAE22:
    return filled(SMALL)


@pytest.fixture(scope="module")
def clip() -> Tensor:
    return random(1, 3, 13, 32, 16)


def chunks_of(total: int) -> st.SearchStrategy[list[int]]:
    """Positive numbers that add up to ``total``."""
    cuts = st.sets(st.integers(1, total - 1)).map(sorted)
    return cuts.map(lambda at: [b - a for a, b in zip([0, *at], [*at, total])])


def test_keys_and_shapes_are_those_of_the_published_checkpoint():
    with torch.device("meta"):
        vae = WanVAE22(WanVAE22Config())
    shapes = {key: list(weight.shape) for key, weight in vae.state_dict().items()}
    published = json.loads(gzip.decompress((DATA / "wan2.2-vae.native.json.gz").read_bytes()))
    assert shapes == {key: entry["shape"] for key, entry in published["tensors"].items()}


def test_one_more_latent_than_groups_of_four_frames_a_sixteenth_the_size(vae: WanVAE22, clip: Tensor):
    latent = vae.encode(clip, vae.initialize_cache())
    assert latent.shape == (1, 4, 4, 2, 1)
    assert vae.decode(latent, vae.initialize_cache()).shape == clip.shape
    assert SMALL.frames(0, 4) == 13


@settings(max_examples=6, deadline=None)
@given(groups=chunks_of(3), leading=st.integers(0, 1))
def test_a_video_encoded_in_any_chunks_is_the_same_bit_for_bit(
    vae: WanVAE22, clip: Tensor, groups: list[int], leading: int
):
    """``leading``: whether the first frame comes with the first group, or in a call of its own."""
    sizes = [4 * group for group in groups]
    sizes = [1, *sizes] if leading else [1 + sizes[0], *sizes[1:]]
    cache = vae.initialize_cache()
    streamed = torch.cat([vae.encode(chunk, cache) for chunk in clip.split(sizes, dim=2)], dim=2)
    assert torch.equal(streamed, vae.encode(clip, vae.initialize_cache()))


@settings(max_examples=6, deadline=None)
@given(sizes=chunks_of(4))
def test_latents_decoded_in_any_chunks_are_the_same_bit_for_bit(vae: WanVAE22, sizes: list[int]):
    latent, cache = random(1, 4, 4, 2, 1), vae.initialize_cache()
    streamed = torch.cat([vae.decode(chunk, cache) for chunk in latent.split(sizes, dim=2)], dim=2)
    assert torch.equal(streamed, vae.decode(latent, vae.initialize_cache()))


def test_streams_of_different_sizes_interleave_as_if_each_ran_alone(vae: WanVAE22):
    latents = [random(1, 4, 3, 2, 1, seed=2), random(2, 4, 3, 1, 1, seed=3)]
    alone = [vae.decode(latent, vae.initialize_cache()) for latent in latents]
    caches = [vae.initialize_cache() for _ in latents]
    together: list[list[Tensor]] = [[] for _ in latents]
    for chunk in (slice(0, 1), slice(1, 3)):
        for latent, cache, frames in zip(latents, caches, together):
            frames.append(vae.decode(latent[:, :, chunk], cache))
    assert all(torch.equal(torch.cat(frames, dim=2), want) for frames, want in zip(together, alone))


def test_encoding_does_not_disturb_decoding_in_the_same_stream(vae: WanVAE22, clip: Tensor):
    latent, cache = random(1, 4, 3, 2, 1), vae.initialize_cache()
    frames = []
    for i, piece in enumerate(clip[:, :, :9].split([1, 4, 4], dim=2)):
        vae.encode(piece, cache)
        frames.append(vae.decode(latent[:, :, i : i + 1], cache))
    assert torch.equal(torch.cat(frames, dim=2), vae.decode(latent, vae.initialize_cache()))


@pytest.mark.parametrize(
    ("time", "space", "out_dim", "frames"), [(1, 2, 6, 3), (2, 2, 6, 4), (2, 2, 12, 1), (1, 1, 3, 2)]
)
def test_the_average_of_each_output_channel_by_hand(time: int, space: int, out_dim: int, frames: int):
    """Samples of a cell, numbered channel, time, row, column, go in equal groups to the output channels."""
    x = random(1, 6, frames, 4, 4)
    early = -frames % time  # zero frames before the first
    got = average_down(x, out_dim, time, space)
    group = 6 * time * space**2 // out_dim
    want = torch.zeros(1, out_dim, (frames + early) // time, 4 // space, 4 // space)
    for c, a, p, q in product(range(6), range(time), range(space), range(space)):
        channel = (((c * time + a) * space + p) * space + q) // group
        for t in range(want.shape[2]):
            if t * time + a >= early:
                want[0, channel, t] += x[0, c, t * time + a - early, p::space, q::space] / group
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(("time", "out_dim"), [(1, 3), (2, 6), (2, 3), (1, 6)])
def test_the_repetition_of_each_input_channel_by_hand(time: int, out_dim: int):
    x = random(1, 6, 2, 3, 2)
    got = repeat_up(x, out_dim, time, 2)
    assert got.shape == (1, out_dim, 2 * time, 6, 4)
    for o, a, p, q in product(range(out_dim), range(time), range(2), range(2)):
        source = (((o * time + a) * 2 + p) * 2 + q) // (out_dim * time * 4 // 6)
        assert torch.equal(got[0, o, a::time, p::2, q::2], x[0, source])


def test_patches_count_columns_before_rows():
    video = random(1, 3, 2, 4, 6)
    packed = to_patches(video, 2)
    for c, row, column in product(range(3), range(2), range(2)):
        assert torch.equal(packed[:, 4 * c + 2 * column + row], video[:, c, :, row::2, column::2])
    assert torch.equal(from_patches(packed, 2), video)


def test_height_and_width_are_multiples_of_sixteen(vae: WanVAE22):
    with pytest.raises(ValueError, match="24x16 .*multiples of 16"):
        vae.encode(torch.zeros(1, 3, 1, 24, 16), vae.initialize_cache())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temporal_downsample": (True, True, True)}, "8x in time and 16x in space; expected 4x and 16x"),
        ({"decoder_dim": 0}, "decoder_dim is 0"),
        ({"dim_mult": (1, 3, 4, 4)}, "a shortcut has 64 samples for 24 channels"),
        ({"dim_mult": (1, 2, 4, 3)}, "a shortcut has 32 samples for 24 channels"),
        ({"latents_mean": (0.0,)}, "latents_mean has 1 entries; expected z_dim=4"),
    ],
)
def test_a_config_out_of_range_says_so(change: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        replace(SMALL, **change).setup()
