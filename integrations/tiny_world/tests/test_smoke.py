"""The built-in model as a plugin: configs, words, controls, codec, weights, and one chunk."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

import tiny_world
from flashdreams import load_pipeline
from flashdreams.config import derive_config
from flashdreams.core.controls import Control, Keys
from flashdreams.plugins.registry import get_runner
from flashdreams.recipes.wan.config import WanNetworkConfig, WanTransformerConfig
from tiny_world._control import action
from tiny_world._text import TinyTextEncoder
from tiny_world._words import TEXT_LEN, VOCABULARY, tokenize
from tiny_world.config import (
    PIPELINE_TINY_WORLD,
    RUNNER_TINY_WORLD,
    TINY_WORLD_CONFIGS,
    ActionEncoderConfig,
    TinyTextEncoderConfig,
    TinyWorldCodecConfig,
    TinyWorldNetworkConfig,
)

pytestmark = pytest.mark.ci_cpu

WEIGHTS = Path(tiny_world.__file__).parent / "weights"


def test_entry_point_names_the_runner() -> None:
    points = importlib.metadata.entry_points(group="flashdreams.runner_configs", name="tiny-world")
    assert [p.load() for p in points] == [RUNNER_TINY_WORLD]
    assert get_runner("tiny-world") == RUNNER_TINY_WORLD
    assert TINY_WORLD_CONFIGS == {"tiny-world": RUNNER_TINY_WORLD}
    assert RUNNER_TINY_WORLD.pipeline is PIPELINE_TINY_WORLD


def test_config_imports_no_torch() -> None:
    code = "import sys, tiny_world.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_config_swap_changes_one_leaf_only() -> None:
    swapped = derive_config(PIPELINE_TINY_WORLD, diffusion_model={"transformer": {"window_size_t": 4}})
    assert swapped.diffusion_model.transformer.window_size_t == 4
    assert PIPELINE_TINY_WORLD.diffusion_model.transformer.window_size_t == 6
    back = derive_config(swapped, diffusion_model={"transformer": {"window_size_t": 6}})
    assert back == PIPELINE_TINY_WORLD


def test_base_network_config_has_only_fields_known_here() -> None:
    """A new field upstream needs a decision here: is its default right for these weights?"""
    known = {
        "dim", "ffn_dim", "num_heads", "num_layers", "in_dim", "out_dim", "text_dim", "text_len", "freq_dim",
        "patch_size", "eps", "rope_theta", "attention", "image_dim", "image_tokens", "image_positions",
    }  # fmt: skip
    assert {f.name for f in dataclasses.fields(WanNetworkConfig)} == known
    assert {f.name for f in dataclasses.fields(TinyWorldNetworkConfig)} == known | {"action_dim"}


def test_base_transformer_config_has_only_fields_known_here() -> None:
    known = {
        "dtype", "checkpoint_path", "state_dict_transform", "transforms", "allow_missing", "network", "len_t",
        "first_len_t", "window_size_t", "sink_size_t", "rope", "context_noise", "guidance_scale", "cfg",
        "negative_prompt", "trained_frames", "stamp_image_latent", "concat_image_mask_to_latent", "takes_last_image",
        "prompt_policy", "recache_sink", "reuse_controls", "max_given_frames",
    }  # fmt: skip
    assert {f.name for f in dataclasses.fields(WanTransformerConfig)} == known


@given(st.text())
def test_tokenizer_takes_any_text(prompt: str) -> None:
    ids = tokenize(prompt)
    assert len(ids) == TEXT_LEN
    assert all(0 <= i < len(VOCABULARY) for i in ids)


def test_tokenizer_knows_its_words() -> None:
    assert len(VOCABULARY) == len(set(VOCABULARY)) == 37
    words = [VOCABULARY[i] for i in tokenize("A Red circle, moves RIGHT on a grey background!")]
    assert words == ["a", "red", "circle", "moves", "right", "on", "a", "gray", "background", *["<pad>"] * 3]
    assert [VOCABULARY[i] for i in tokenize("huge circle")][:2] == ["<unk>", "circle"]
    assert tokenize("") == tokenize("...") == [0] * TEXT_LEN


def test_word_order_and_every_word_matter_to_the_text_encoder() -> None:
    encoder = TinyTextEncoder(TinyTextEncoderConfig())
    red, blue = encoder.encode(["a red circle on a blue background", "a blue circle on a red background"])
    assert red.shape == (TEXT_LEN, 96)
    assert not torch.allclose(red, blue)


def parse(text: str) -> Sequence[Control | None]:
    return ActionEncoderConfig().parse_controls(text, 64)


def test_controls_hold_keys_for_frames() -> None:
    right, none, d = Control(word="right"), Control(word="none"), Control(keys=Keys("d"))
    assert parse("right:2 none:1, d:1") == [right, right, none, d]
    assert parse("right") == [right] * 16
    assert [action(control) for control in parse("w:1 a:1 s:1 Up:1")] == ["up", "left", "down", "up"]


def test_of_several_keys_the_one_pressed_last_counts() -> None:
    assert action(Control(keys=Keys("w", "d"))) == "right" and action(Control(keys=Keys("d", "ArrowUp"))) == "up"
    assert action(Control(keys=Keys())) == action(None) == "none"


@pytest.mark.parametrize("text", ["jump", "right:0", "right:-1", "right:x", "right:", "right:99999999999", ":3", ""])
def test_bad_controls_are_named(text: str) -> None:
    with pytest.raises(ValueError, match="control"):
        parse(text)


def test_actions_fall_into_latents_and_frame_0_has_none() -> None:
    encoder = ActionEncoderConfig().setup()
    ids = encoder.encode([parse("up:1 left:1") + [None, Control(word="right"), Control(keys=Keys("d"))]], 0, 2, None)
    assert ids.tolist() == [[[5, 5, 5, 5], [1, 0, 2, 2]]]
    assert encoder.encode([parse("left:1 right:1 up:1 down:1")], 3, 4, None).tolist() == [[[1, 2, 3, 4]]]


def test_codec_streamed_equals_whole() -> None:
    torch.manual_seed(0)
    codec = TinyWorldCodecConfig(checkpoint_path=PIPELINE_TINY_WORLD.decoder.checkpoint_path).setup()
    video = torch.rand(2, 3, 13, 48, 80) * 2 - 1
    whole = codec.encode(video, codec.initialize_cache())
    assert whole.shape == (2, 12, 4, 3, 5)
    cache = codec.initialize_cache()
    parts = torch.cat([codec.encode(part, cache) for part in video.split([1, 8, 4], dim=2)], dim=2)
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-5)
    decoded = codec.decode(whole, codec.initialize_cache())
    assert decoded.shape == video.shape
    cache = codec.initialize_cache()
    pieces = torch.cat([codec.decode(part, cache) for part in whole.split([2, 1, 1], dim=2)], dim=2)
    torch.testing.assert_close(pieces, decoded, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(2, 48, 48), (1, 50, 48), (1, 48, 20)])
def test_codec_refuses_sizes_it_cannot_code(shape: tuple[int, int, int]) -> None:
    codec = TinyWorldCodecConfig().setup()
    with pytest.raises(ValueError, match="expected"):
        codec.encode(torch.zeros(1, 3, *shape), codec.initialize_cache())


def test_weights_fit_in_12_megabytes_and_load_strictly() -> None:
    files = sorted(WEIGHTS.glob("*.safetensors"))
    assert [f.name for f in files] == ["codec.safetensors", "network.safetensors", "text_encoder.safetensors"]
    assert sum(f.stat().st_size for f in files) <= 11_900_000
    modules = {
        "codec": TinyWorldCodecConfig().setup(),
        "network": TinyWorldNetworkConfig().setup(),
        "text_encoder": TinyTextEncoderConfig().setup(),
    }
    for file in files:
        with safe_open(file, "pt") as opened:
            stored = {key: tuple(opened.get_slice(key).get_shape()) for key in opened.keys()}  # noqa: SIM118
        assert stored == {key: tuple(value.shape) for key, value in modules[file.stem].state_dict().items()}


def test_one_chunk_and_the_next() -> None:
    pipeline = load_pipeline("tiny-world", device="cpu")
    chunks = list(pipeline.rollout(prompt="a red circle moves right", seed=0, num_chunk=2))
    assert [tuple(c.frames.shape) for c in chunks] == [(1, 128, 128, 3), (4, 128, 128, 3)]
    assert all(c.frames.dtype == torch.uint8 for c in chunks)
    again = next(iter(pipeline.rollout(prompt="a red circle moves right", seed=0, num_chunk=1)))
    assert torch.equal(again.frames, chunks[0].frames)
    other = next(iter(pipeline.rollout(prompt="a red circle moves right", seed=1, num_chunk=1)))
    assert not torch.equal(other.frames, chunks[0].frames)


def test_empty_and_unknown_prompts_give_a_picture() -> None:
    pipeline = load_pipeline("tiny-world", device="cpu")
    for chunk in pipeline.rollout(prompt=["", "zebra \N{ROCKET} quantum"], seed=0, num_chunk=1):
        assert chunk.frames.float().std() > 1
