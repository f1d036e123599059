"""The Wan2.1 VAE: published keys and exact streaming. (diffusers' numbers: ``tests/parity``.)"""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flashdreams.config import ConfigError
from flashdreams.recipes.wan.vae import WanVAE
from flashdreams.recipes.wan.vae_config import WanVAEConfig

pytestmark = pytest.mark.ci_cpu

DATA = Path(__file__).parent / "data"
SMALL = WanVAEConfig(dim=8, z_dim=4, num_res_blocks=1, latents_mean=(0.1, -0.2, 0.3, 0.0), latents_std=(1.5, 0.5, 2, 1))


def published(name: str) -> dict:
    return json.loads(gzip.decompress((DATA / name).read_bytes()))


def filled(config: WanVAEConfig, seed: int = 0) -> WanVAE:
    """A VAE whose every weight is random, norm gains and biases included."""
    vae = WanVAE(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, weight in vae.named_parameters():
        spread = 1 / weight[0].numel() ** 0.5 if weight.ndim > 1 and "gamma" not in name else 0.1
        weight.copy_(torch.randn(weight.shape, generator=generator) * spread + ("gamma" in name))
    return vae


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1


@pytest.fixture(scope="module")
def vae() -> WanVAE:
    return filled(SMALL)


@pytest.fixture(scope="module")
def clip() -> Tensor:
    return random(1, 3, 21, 16, 24)


def chunks_of(total: int) -> st.SearchStrategy[list[int]]:
    """Positive numbers that add up to ``total``."""
    cuts = st.sets(st.integers(1, total - 1)).map(sorted)
    return cuts.map(lambda at: [b - a for a, b in zip([0, *at], [*at, total])])


def test_keys_and_shapes_are_those_of_the_published_checkpoint():
    with torch.device("meta"):
        vae = WanVAE(WanVAEConfig())
    shapes = {key: list(weight.shape) for key, weight in vae.state_dict().items()}
    assert shapes == {key: entry["shape"] for key, entry in published("wan2.1-vae.native.json.gz")["tensors"].items()}


def test_one_more_latent_than_groups_of_four_frames_an_eighth_the_size(vae: WanVAE, clip: Tensor):
    latent = vae.encode(clip, vae.initialize_cache())
    assert latent.shape == (1, 4, 6, 2, 3)
    assert vae.decode(latent, vae.initialize_cache()).shape == clip.shape


@settings(max_examples=15, deadline=None)
@given(groups=chunks_of(5), leading=st.integers(0, 1))
def test_a_video_encoded_in_any_chunks_is_the_same_bit_for_bit(
    vae: WanVAE, clip: Tensor, groups: list[int], leading: int
):
    """``leading``: whether the first frame comes with the first group, or in a call of its own."""
    sizes = [4 * group for group in groups]
    sizes = [1, *sizes] if leading else [1 + sizes[0], *sizes[1:]]
    cache = vae.initialize_cache()
    streamed = torch.cat([vae.encode(chunk, cache) for chunk in clip.split(sizes, dim=2)], dim=2)
    assert torch.equal(streamed, vae.encode(clip, vae.initialize_cache()))


@settings(max_examples=15, deadline=None)
@given(sizes=chunks_of(6))
def test_latents_decoded_in_any_chunks_are_the_same_bit_for_bit(vae: WanVAE, sizes: list[int]):
    latent, cache = random(1, 4, 6, 2, 3), vae.initialize_cache()
    streamed = torch.cat([vae.decode(chunk, cache) for chunk in latent.split(sizes, dim=2)], dim=2)
    assert torch.equal(streamed, vae.decode(latent, vae.initialize_cache()))


def test_later_frames_do_not_change_earlier_ones(vae: WanVAE, clip: Tensor):
    other = clip.clone()
    other[:, :, 13:] = 0
    one, two = (vae.encode(video, vae.initialize_cache()) for video in (clip, other))
    assert torch.equal(one[:, :, :4], two[:, :, :4])
    assert not torch.equal(one[:, :, 4:], two[:, :, 4:])


def test_streams_of_different_sizes_interleave_as_if_each_ran_alone(vae: WanVAE):
    latents = [random(1, 4, 5, 2, 3, seed=2), random(2, 4, 5, 3, 2, seed=3), random(1, 4, 5, 2, 3, seed=4)]
    alone = [vae.decode(latent, vae.initialize_cache()) for latent in latents]
    caches = [vae.initialize_cache() for _ in latents]
    together: list[list[Tensor]] = [[] for _ in latents]
    for chunk in (slice(0, 1), slice(1, 3), slice(3, 5)):
        for latent, cache, frames in zip(latents, caches, together):
            frames.append(vae.decode(latent[:, :, chunk], cache))
    assert all(torch.equal(torch.cat(frames, dim=2), want) for frames, want in zip(together, alone))


def test_encoding_does_not_disturb_decoding_in_the_same_stream(vae: WanVAE, clip: Tensor):
    latent, cache = random(1, 4, 4, 2, 3), vae.initialize_cache()
    frames = []
    for i, piece in enumerate(clip[:, :, :13].split([1, 4, 4, 4], dim=2)):
        vae.encode(piece, cache)
        frames.append(vae.decode(latent[:, :, i : i + 1], cache))
    assert torch.equal(torch.cat(frames, dim=2), vae.decode(latent, vae.initialize_cache()))


def test_the_state_of_a_stream_is_a_copy_of_at_most_two_frames_per_layer(vae: WanVAE):
    cache = vae.initialize_cache()
    vae.decode(random(1, 4, 3, 2, 3), cache)
    saved, before = dict(cache.decoder), {path: state.clone() for path, state in cache.decoder.items()}
    assert all(state.shape[2] == 2 for state in saved.values())
    assert all(state.untyped_storage().nbytes() == state.nbytes for state in saved.values())
    vae.decode(random(1, 4, 2, 2, 3), cache)
    assert all(torch.equal(saved[path], before[path]) for path in before), "a saved state must not change later"


def test_decoded_video_is_clamped(vae: WanVAE):
    latent = 40 * random(1, 4, 2, 2, 3)
    raw = vae.decode_unclamped(latent, vae.initialize_cache())
    assert raw.abs().max() > 1
    assert torch.equal(vae.decode(latent, vae.initialize_cache()), raw.clamp(-1, 1))


def test_half_precision_weights_take_and_give_float32_latents(vae: WanVAE, clip: Tensor):
    half = filled(SMALL).to(torch.bfloat16)
    latent = half.encode(clip, half.initialize_cache())
    want = vae.encode(clip, vae.initialize_cache())
    assert latent.dtype == torch.float32
    assert (latent - want).abs().max() < 0.1 * want.abs().max()
    assert half.decode(latent, half.initialize_cache()).dtype == torch.bfloat16


@pytest.mark.parametrize("frames", [0, 2, 4, 8])
def test_a_stream_starts_with_one_frame_and_groups_of_four(vae: WanVAE, frames: int):
    with pytest.raises(ValueError, match=f"{frames} frames; expected 1 \\+ a multiple of 4 in the first call"):
        vae.encode(torch.zeros(1, 3, frames, 16, 16), vae.initialize_cache())


@pytest.mark.parametrize("frames", [0, 1, 5, 6])
def test_a_stream_goes_on_with_groups_of_four_frames(vae: WanVAE, frames: int):
    cache = vae.initialize_cache()
    vae.encode(torch.zeros(1, 3, 1, 16, 16), cache)
    with pytest.raises(ValueError, match=f"{frames} frames; expected a multiple of 4 in a later call"):
        vae.encode(torch.zeros(1, 3, frames, 16, 16), cache)


def test_a_refused_video_leaves_the_stream_as_it_was(vae: WanVAE, clip: Tensor):
    cache = vae.initialize_cache()
    first = vae.encode(clip[:, :, :5], cache)
    with pytest.raises(ValueError):
        vae.encode(clip[:, :, 5:8], cache)
    rest = vae.encode(clip[:, :, 5:], cache)
    assert torch.equal(torch.cat([first, rest], dim=2), vae.encode(clip, vae.initialize_cache()))


@pytest.mark.parametrize(("height", "width"), [(20, 16), (16, 20), (7, 7)])
def test_height_and_width_are_multiples_of_eight(vae: WanVAE, height: int, width: int):
    with pytest.raises(ValueError, match=f"{height}x{width} .*multiples of 8"):
        vae.encode(torch.zeros(1, 3, 1, height, width), vae.initialize_cache())


@pytest.mark.parametrize("shape", [(1, 5, 1, 2, 2), (1, 4, 0, 2, 2)])
def test_decode_names_a_latent_it_cannot_take(vae: WanVAE, shape: tuple[int, ...]):
    with pytest.raises(ValueError, match=r"expected \[B, 4, T, h, w\] with T >= 1"):
        vae.decode(torch.zeros(shape), vae.initialize_cache())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temporal_downsample": (False, True)}, "has 2 entries; 4 levels"),
        ({"temporal_downsample": (True, True, True)}, "8x in time and 8x in space; expected 4x and 8x"),
        ({"dim_mult": (1, 2, 4), "temporal_downsample": (True, True)}, "4x in time and 4x in space"),
        ({"dim_mult": ()}, "at least 1"),
        ({"dim": 0}, "dim=0"),
        ({"dim": 9, "dim_mult": (1, 1, 1, 1)}, "9 channels wide"),
        ({"latents_mean": (0.0,)}, "latents_mean has 1 entries; expected z_dim=4"),
        ({"latents_std": (1.0, 1.0, 0.0, 1.0)}, "latents_std holds 0.0"),
    ],
)
def test_a_config_out_of_range_says_so(change: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        replace(SMALL, **change).validate_tree()
