"""TAEHV codecs: published keys, streaming that equals the whole, and the geometry of the VAEs they replace."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn

from flashdreams.config import ConfigError
from flashdreams.recipes.taehv.config import TAEHVConfig
from flashdreams.recipes.taehv.taehv import TAEHV, GrowTime, Memory, PoolTime, keep_last_rows

pytestmark = pytest.mark.ci_cpu

DATA = Path(__file__).parent / "data"
PUBLISHED = {
    "taew2_1": TAEHVConfig(),
    "taew2_2": TAEHVConfig(latent_channels=48, patch_size=2),
    "taew2_2_super": TAEHVConfig(latent_channels=48, patch_size=2, layout="super"),
    "taehv1_5": TAEHVConfig(latent_channels=32, patch_size=2),
    "taehv1_5_super": TAEHVConfig(latent_channels=32, patch_size=2, layout="super"),
    "taeltx_2": TAEHVConfig(latent_channels=128, patch_size=4, encoder_time=(2, 2, 2), decoder_time=(2, 2, 2)),
}


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def close(a: Tensor, b: Tensor) -> bool:
    """Equal but for the rounding of sums taken in another order."""
    return torch.allclose(a, b, rtol=1e-5, atol=1e-5)


def with_passes_of(latents: int, codec: TAEHV) -> TAEHV:
    """The same weights, run in passes of another size."""
    with torch.device("meta"):
        other = TAEHV(replace(codec.config, latents_per_pass=latents)).requires_grad_(False)
    other.load_state_dict(codec.state_dict(), assign=True)
    return other


@pytest.fixture(scope="module", params=["taew2_1", "taew2_2_super"])
def codec(request) -> TAEHV:
    return PUBLISHED[request.param].setup()


@pytest.fixture(scope="module")
def latent(codec: TAEHV) -> Tensor:
    return random(1, codec.config.latent_channels, 5, 2, 1)


@pytest.fixture(scope="module")
def clip(codec: TAEHV) -> Tensor:
    return random(1, 3, 13, codec.spatial_compression, 2 * codec.spatial_compression)


@pytest.mark.parametrize("name", PUBLISHED)
def test_keys_and_shapes_are_those_of_the_published_checkpoint(name: str):
    with torch.device("meta"):
        codec = TAEHV(PUBLISHED[name])
    shapes = {key: list(weight.shape) for key, weight in codec.state_dict().items()}
    published = json.loads(gzip.decompress((DATA / f"{name}.json.gz").read_bytes()))
    assert shapes == {key: entry["shape"] for key, entry in published["tensors"].items()}


@pytest.mark.parametrize("name", PUBLISHED)
def test_decoded_video_has_the_frames_and_size_that_the_config_foretells(name: str):
    config = PUBLISHED[name]
    with torch.device("meta"):
        codec, latent = TAEHV(config), torch.zeros(2, config.latent_channels, 5, 3, 2)
        cache = codec.initialize_cache()
        first, rest = codec.decode(latent[:, :, :2], cache), codec.decode(latent[:, :, 2:], cache)
    cell = config.spatial_compression
    assert first.shape == (2, 3, config.frames(0, 2), 3 * cell, 2 * cell)
    assert rest.shape == (2, 3, config.frames(2, 5), 3 * cell, 2 * cell)
    assert config.frames(0, 5) == 1 + 4 * config.temporal_compression


def one_frame_at_a_time(layers: nn.ModuleList, frames: Tensor) -> Tensor:
    """Every frame goes through the whole list before the next one starts; the slow, obvious way."""
    last: dict[int, Tensor] = {}
    waiting: dict[int, list[Tensor]] = {}
    out: list[Tensor] = []

    def push(x: Tensor, index: int) -> None:
        if index == len(layers):
            out.append(x)
            return
        layer = layers[index]
        if isinstance(layer, Memory):
            y = layer(x, last.get(index, torch.zeros_like(x)))
            last[index] = x
            push(y, index + 1)
        elif isinstance(layer, PoolTime):
            group = waiting.setdefault(index, [])
            group.append(x)
            if len(group) == layer.factor:
                push(F.conv2d(torch.cat(waiting.pop(index), dim=1), layer.conv.weight), index + 1)
        elif isinstance(layer, GrowTime):
            for y in F.conv2d(x, layer.conv.weight).chunk(layer.factor, dim=1):
                push(y, index + 1)
        else:
            push(layer(x), index + 1)

    for frame in frames.unbind(1):
        push(frame, 0)
    return torch.stack(out, dim=1)


def test_decoding_equals_one_frame_at_a_time_without_the_first_three(codec: TAEHV, latent: Tensor):
    frames = one_frame_at_a_time(codec.decoder, latent.transpose(1, 2))
    want = F.pixel_shuffle(frames, codec.config.patch_size)[:, 3:].transpose(1, 2) * 2 - 1
    assert close(codec.decode_unclamped(latent, codec.initialize_cache()), want)


def test_encoding_equals_one_frame_at_a_time_with_the_last_repeated(codec: TAEHV, clip: Tensor):
    frames = torch.cat((clip, *[clip[:, :, -1:]] * 3), dim=2).transpose(1, 2) / 2 + 0.5
    want = one_frame_at_a_time(codec.encoder, F.pixel_unshuffle(frames, codec.config.patch_size)).transpose(1, 2)
    assert want.shape[2] == 4
    assert close(codec.encode(clip, codec.initialize_cache()), want)


@settings(max_examples=4, deadline=None)
@given(cuts=st.sets(st.integers(1, 4)), latents_per_pass=st.integers(1, 6))
def test_latents_decoded_in_any_chunks_equal_the_whole(
    codec: TAEHV, latent: Tensor, cuts: set[int], latents_per_pass: int
):
    whole = codec.decode(latent, codec.initialize_cache())
    other = with_passes_of(latents_per_pass, codec)
    cache = other.initialize_cache()
    streamed = [other.decode(chunk, cache) for chunk in latent.tensor_split(sorted(cuts), dim=2)]
    assert close(torch.cat(streamed, dim=2), whole)


@settings(max_examples=4, deadline=None)
@given(cuts=st.sets(st.sampled_from([4, 8, 12])))
def test_a_video_encoded_in_groups_of_four_frames_and_a_rest_equals_the_whole(
    codec: TAEHV, clip: Tensor, cuts: set[int]
):
    cache = codec.initialize_cache()
    streamed = [codec.encode(chunk, cache) for chunk in clip.tensor_split(sorted(cuts), dim=2)]
    assert close(torch.cat(streamed, dim=2), codec.encode(clip, codec.initialize_cache()))


def test_one_latent_per_pass_makes_streaming_bit_exact(latent: Tensor, codec: TAEHV):
    one = with_passes_of(1, codec)
    cache = one.initialize_cache()
    streamed = torch.cat([one.decode(chunk, cache) for chunk in latent.split(2, dim=2)], dim=2)
    assert torch.equal(streamed, one.decode(latent, one.initialize_cache()))


def test_streams_of_different_sizes_interleave_as_if_each_ran_alone(codec: TAEHV):
    channels = codec.config.latent_channels
    latents = [random(1, channels, 3, 2, 1, seed=2), random(2, channels, 3, 1, 2, seed=3)]
    alone = []
    for latent in latents:
        cache = codec.initialize_cache()
        alone.append([codec.decode(chunk, cache) for chunk in latent.split(1, dim=2)])
    caches = [codec.initialize_cache() for _ in latents]
    for i in range(3):
        for latent, cache, want in zip(latents, caches, alone):
            assert torch.equal(codec.decode(latent[:, :, i : i + 1], cache), want[i])


def test_encoding_does_not_disturb_decoding_in_the_same_stream(codec: TAEHV, latent: Tensor, clip: Tensor):
    cache, lone = codec.initialize_cache(), codec.initialize_cache()
    for i in range(3):
        codec.encode(clip[:, :, 4 * i : 4 * i + 4], cache)
        chunk = latent[:, :, i : i + 1]
        assert torch.equal(codec.decode(chunk, cache), codec.decode(chunk, lone))


def test_a_saved_state_does_not_change_later(codec: TAEHV, latent: Tensor):
    cache = codec.initialize_cache()
    codec.decode(latent[:, :, :2], cache)
    saved, before = dict(cache.decoder), {index: state.clone() for index, state in cache.decoder.items()}
    assert all(state.untyped_storage().nbytes() == state.nbytes for state in saved.values())
    codec.decode(latent[:, :, 2:], cache)
    assert all(torch.equal(saved[index], before[index]) for index in before)


def test_pixels_are_in_minus_one_to_one_on_both_sides(codec: TAEHV):
    """The layers themselves work in [0, 1]: black is 0 there, and what they give below 0 or above 1 is cut off."""
    cell, last = codec.spatial_compression, len(codec.decoder) - 1
    seen: list[Tensor] = []
    hook = codec.encoder[0].register_forward_pre_hook(lambda layer, inputs: seen.append(inputs[0]))
    codec.encode(torch.full((1, 3, 4, cell, cell), -1.0), codec.initialize_cache())
    codec.encode(torch.full((1, 3, 4, cell, cell), 1.0), codec.initialize_cache())
    hook.remove()
    assert seen[0].eq(0).all() and seen[1].eq(1).all()
    latent = torch.zeros(1, codec.config.latent_channels, 1, 1, 1)
    for raw, shown in ((0.0, -1.0), (0.5, 0.0), (1.0, 1.0), (-3.0, -1.0), (2.0, 1.0)):
        hook = codec.decoder[last].register_forward_hook(lambda layer, inputs, out, raw=raw: torch.full_like(out, raw))
        assert codec.decode(latent, codec.initialize_cache()).eq(shown).all()
        hook.remove()


def test_a_single_first_frame_makes_one_latent(codec: TAEHV):
    image = random(1, 3, 1, codec.spatial_compression, codec.spatial_compression)
    four_times = codec.encode(image.expand(-1, -1, 4, -1, -1), codec.initialize_cache())
    assert torch.equal(codec.encode(image, codec.initialize_cache()), four_times)


def test_frames_after_a_padded_end_are_refused(codec: TAEHV, clip: Tensor):
    cache = codec.initialize_cache()
    codec.encode(clip[:, :, :5], cache)
    with pytest.raises(ValueError, match="this stream has ended: .* no multiple of 4"):
        codec.encode(clip[:, :, 5:9], cache)


def test_a_video_of_another_size_or_of_no_frames_is_refused(codec: TAEHV):
    cell = codec.spatial_compression
    with pytest.raises(ValueError, match=f"{cell + 4}x{cell} .*multiples of {cell}"):
        codec.encode(torch.zeros(1, 3, 4, cell + 4, cell), codec.initialize_cache())
    with pytest.raises(ValueError, match="0 frames; expected at least 1"):
        codec.encode(torch.zeros(1, 3, 0, cell, cell), codec.initialize_cache())


@pytest.mark.parametrize(("channels", "frames"), [(7, 1), (None, 0)])
def test_decode_names_a_latent_it_cannot_take(codec: TAEHV, channels: int | None, frames: int):
    expected = codec.config.latent_channels
    with pytest.raises(ValueError, match=rf"expected \[B, {expected}, T, h, w\] with T >= 1"):
        codec.decode(torch.zeros(1, channels or expected, frames, 2, 2), codec.initialize_cache())


def test_growing_layers_keep_the_last_rows_of_a_longer_file(tmp_path: Path):
    """A file made for twice as many frames at the first level loads; its last rows are those of the later frame."""
    state = {key: value.clone() for key, value in TAEHV(TAEHVConfig()).state_dict().items()}
    kept = state["decoder.7.conv.weight"]
    state["decoder.7.conv.weight"] = torch.cat((torch.full_like(kept, 9.0), kept))
    cut = keep_last_rows(state)
    assert torch.equal(cut["decoder.7.conv.weight"], kept)
    assert all(torch.equal(cut[key], state[key]) for key in state if key != "decoder.7.conv.weight")
    save_file(state, tmp_path / "taew2_1.safetensors")
    codec = TAEHVConfig(checkpoint_path=str(tmp_path / "taew2_1.safetensors")).setup()
    assert torch.equal(codec.decoder[7].conv.weight, kept)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"latent_channels": 0}, "latent_channels=0"),
        ({"patch_size": 0}, "patch_size=0"),
        ({"latents_per_pass": 0}, "latents_per_pass=0"),
        ({"decoder_time": (2, 2)}, r"decoder_time is \(2, 2\); expected one factor"),
        ({"encoder_time": (2, 2, 0)}, "encoder_time is"),
        ({"decoder_time": (2, 2, 2)}, "one latent of 4 frames, .* 8 frames of one; they must be equal"),
    ],
)
def test_a_config_out_of_range_says_so(change: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        replace(TAEHVConfig(), **change).validate_tree()
