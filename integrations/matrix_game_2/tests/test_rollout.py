"""Rollouts of a Matrix-Game-2-shaped model: an endless stream under live keys, saved, resumed and interleaved."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flashdreams.config import derive_config
from flashdreams.core.controls import Control, Keys, Mouse
from flashdreams.core.kv_cache import CacheGeometry, RollingKVCache
from flashdreams.core.noise import KeyedNoise
from flashdreams.core.rope import rope_3d
from flashdreams.infra.pipeline import StreamInferencePipeline
from flashdreams.recipes.wan.network import ChunkContext, NetworkCache

pytestmark = pytest.mark.ci_cpu

SLUG = "matrix-game-2-universal"
KEYS = ["w", None, "a", "look-left", "s+d", "w+i", None, "j", "w", "d", "k", "w+l"]


def latents(pipeline: StreamInferencePipeline, picture: Tensor, keys: list[str | None], **request: Any) -> list[Tensor]:
    """Of one chunk per key, each held from its chunk on."""
    with pipeline.rollout(image=picture, **request) as rollout:
        out = []
        for key in keys:
            rollout.set_control(key)
            out.append(next(rollout).latent)
        return out


def state_bytes(value: Any) -> int:
    """Bytes of every tensor of a cache tree."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(map(state_bytes, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(state_bytes, value))
    if dataclasses.is_dataclass(value) or isinstance(value, RollingKVCache):
        return sum(map(state_bytes, vars(value).values()))
    return 0


@pytest.mark.parametrize("slug", [SLUG, "matrix-game-2-gta-drive", "matrix-game-2-templerun"])
def test_a_long_stream_has_flat_memory(slug: str, quick, picture) -> None:
    pipeline = quick(slug).pipeline.setup()
    sizes, frames = [], 0
    with pipeline.rollout(image=picture, seed=1) as rollout:
        for index in range(12):
            rollout.set_control(["w", None, "a", "d"][index % 4])
            chunk = next(rollout)
            frames += len(chunk.frames)
            assert torch.isfinite(chunk.latent).all()
            rollout.flush()
            sizes.append(state_bytes(rollout.cache))
    assert frames == 9 + 11 * 12
    assert len(set(sizes[3:])) == 1, "once the window is full nothing grows"


def test_keys_steer_the_chunk_they_are_held_in_and_those_after_it(pipeline, picture) -> None:
    """Up to then the rollouts are one."""
    plain = latents(pipeline, picture, [None] * 4, seed=3)
    steered = latents(pipeline, picture, [None, None, "w", None], seed=3)
    looked = latents(pipeline, picture, [None, None, "look-left", None], seed=3)
    for chunk in (0, 1):
        assert torch.equal(plain[chunk], steered[chunk]) and torch.equal(plain[chunk], looked[chunk])
    for chunk in (2, 3):
        assert not torch.allclose(plain[chunk], steered[chunk], atol=1e-4)
        assert not torch.allclose(plain[chunk], looked[chunk], atol=1e-4)
        assert not torch.allclose(steered[chunk], looked[chunk], atol=1e-4)


def test_a_mouse_of_the_same_motion_is_the_word_for_it(pipeline, picture) -> None:
    word = latents(pipeline, picture, ["w+look-right"] * 2, seed=3)
    with pipeline.rollout(image=picture, seed=3) as rollout:
        rollout.set_control(Control(keys=Keys("w"), mouse=Mouse(dx=0.1)))
        assert all(torch.equal(next(rollout).latent, latent) for latent in word)


def test_interleaved_rollouts_of_other_sizes_equal_those_alone(pipeline, picture) -> None:
    wide = torch.randint(0, 256, (48, 64, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(4))
    alone = latents(pipeline, picture, KEYS[:5], seed=1)
    other = latents(pipeline, wide, KEYS[5:10], seed=2, height=48, width=64)
    one, two = pipeline.rollout(image=picture, seed=1), pipeline.rollout(image=wide, seed=2, height=48, width=64)
    for i in range(5):
        one.set_control(KEYS[i])
        two.set_control(KEYS[5 + i])
        assert torch.equal(next(one).latent, alone[i])
        assert torch.equal(next(two).latent, other[i])


@pytest.mark.parametrize("slug", [SLUG, "matrix-game-2-gta-drive", "matrix-game-2-templerun"])
@pytest.mark.parametrize("made", [1, 4])
def test_a_saved_rollout_goes_on_bit_for_bit(slug: str, made: int, quick, picture, tmp_path: Path) -> None:
    """In a pipeline set up anew, with a window that is filling and one that rolls; the last key is still told to the
    chunk after, from what the encoder kept."""
    pipeline = quick(slug).pipeline.setup()
    keys = ["w", "a", None, "d", "s", "w"]
    want = latents(pipeline, picture, keys, seed=6)
    with pipeline.rollout(image=picture, seed=6) as rollout:
        for key in keys[:made]:
            rollout.set_control(key)
            next(rollout)
        rollout.save(tmp_path / "state.safetensors")
    fresh = quick(slug).pipeline.setup()
    with fresh.resume(tmp_path / "state.safetensors") as rollout:
        for key, latent in zip(keys[made:], want[made:], strict=True):
            rollout.set_control(key)
            assert torch.equal(next(rollout).latent, latent)


def test_a_saved_rollout_is_nothing_without_its_action_caches(pipeline, picture, tmp_path: Path) -> None:
    """The caches matter, so that the test above could fail."""
    with pipeline.rollout(image=picture, seed=6) as rollout:
        rollout.set_control("w")
        next(rollout)
        rollout.save(tmp_path / "state.safetensors")
    chunks = []
    for part in (None, "mouse", "keyboard"):
        with pipeline.resume(tmp_path / "state.safetensors") as rollout:
            state = rollout.cache.experts[0].branches[0].blocks[0].state
            if part is not None:
                getattr(state, part).v.zero_()
            chunks.append(next(rollout).latent)
    assert not torch.allclose(chunks[0], chunks[1], atol=1e-4)
    assert not torch.allclose(chunks[0], chunks[2], atol=1e-4)


def test_a_batch_equals_its_samples(pipeline, picture) -> None:
    """Two players in one batch, each with keys of their own: equal, not bit for bit."""
    other = picture.flip(1)
    rows = [["w"] * 9 + ["a"] * 12, ["look-left"] * 9 + ["s"] * 12]
    both = pipeline.rollout(["", ""], image=torch.stack((picture, other)), control=rows, num_chunk=2, seed=0)
    together = torch.cat([chunk.latent for chunk in both], dim=2)
    for sample, image in enumerate((picture, other)):
        alone = pipeline.rollout(image=image, control=rows[sample], num_chunk=2, noise=KeyedNoise(0, (str(sample),)))
        alone = torch.cat([chunk.latent for chunk in alone], dim=2)
        torch.testing.assert_close(together[sample], alone[0], rtol=1e-4, atol=1e-4)


def test_keyboard_keys_and_values_made_once_per_chunk_change_nothing(pipeline, picture) -> None:
    """``reuse_controls``: the same numbers, with one preparation per chunk in place of one per pass."""
    again = derive_config(pipeline.config, {"diffusion_model.transformer.reuse_controls": False}).setup()
    counts = []
    for each in (pipeline, again):
        network, made = each.diffusion_model.transformer.network, []
        prepare = network.prepare
        network.prepare = lambda input, prepare=prepare, made=made: made.append(1) or prepare(input)
        counts.append((latents(each, picture, KEYS[:3], seed=5), len(made)))
    (once, few), (anew, many) = counts
    assert all(torch.equal(a, b) for a, b in zip(once, anew, strict=True))
    assert (few, many) == (3, 3 * 3 + 2), "three chunks of three steps, two of which are committed"


@pytest.mark.parametrize("slug", [SLUG, "matrix-game-2-gta-drive", "matrix-game-2-templerun"])
def test_streaming_equals_block_causal(slug: str, quick, picture) -> None:
    """Reference: the clean clip in one pass under a mask, in which the frames of a chunk see those in its window; its
    keys and values are those that six commits left in the caches."""
    pipeline = quick(slug).pipeline.setup()
    config, network = pipeline.config.diffusion_model.transformer, pipeline.diffusion_model.transformer.network
    rollout = pipeline.rollout(image=picture, seed=2)
    clips, inputs = [], []
    for key in ("w", "a", None, "d", "s", "w"):
        rollout.set_control(key)
        clips.append(next(rollout).latent)
        inputs.append(rollout.cache.pending["input"])
    rollout.flush()
    frames, rows, columns, window = 18, 2, 3, config.window_size_t
    tokens = rows * columns
    clip = torch.cat((torch.cat(clips, dim=2), *(each for each in given_frames(rollout.cache.conditions, frames))), 1)
    of = torch.arange(frames)
    end = (of // 3 + 1) * 3
    seen = (of < end[:, None]) & (of >= end[:, None] - window)
    mask = seen.repeat_interleave(tokens, 0).repeat_interleave(tokens, 1)
    cache = NetworkCache(network.encode_text(None, rollout.cache.conditions.image_embed))
    geometry = CacheGeometry(frames, 0, tokens)
    for module, block in zip(network.blocks, cache.blocks, strict=True):
        block.self_kv = RollingKVCache(geometry, 1, config.network.num_heads, 24, torch.float32, "cpu")
        block.state = module.initialize_state(geometry, 1, torch.float32, torch.device("cpu"))
    context = ChunkContext(
        rope_3d(range(frames), rows, columns, 24), torch.arange(frames * tokens), frames * tokens, mask=mask,
        shape=(frames, rows, columns),
    )  # fmt: skip
    context = dataclasses.replace(context, place=network.place(context))
    told = {name: torch.cat([each[name] for each in inputs], dim=1) for name in inputs[0]}
    with torch.no_grad():
        network(clip, torch.zeros(1), context, cache, network.prepare(told))
    left = range(frames - window, frames)
    for streamed, whole in zip(rollout.cache.experts[0].branches[0].blocks, cache.blocks, strict=True):
        pairs = [(streamed.self_kv, whole.self_kv, tokens)]
        if streamed.state is not None:
            pairs += [(streamed.state.keyboard, whole.state.keyboard, 1)]
            pairs += [(streamed.state.mouse, whole.state.mouse, 1)] if whole.state.mouse is not None else []
        for ours, want, each in pairs:
            at = [slot * each + i for slot in (frame % window for frame in left) for i in range(each)]
            where = [frame * each + i for frame in left for i in range(each)]
            torch.testing.assert_close(ours.k[:, at], want.k[:, where], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(ours.v[:, at], want.v[:, where], rtol=1e-5, atol=1e-5)


def given_frames(conditions: Any, frames: int) -> Iterator[Tensor]:
    """Mask and latents of the given picture, of so many latent frames."""
    for part in (conditions.image_mask, conditions.image_latent):
        yield part[:, :, [min(frame, part.shape[2] - 1) for frame in range(frames)]]


def test_action_modules_that_say_nothing_leave_the_base_model_bit_for_bit(pipeline, picture) -> None:
    transformer = pipeline.diffusion_model.transformer
    for name, parameter in transformer.named_parameters():
        if "proj_mouse" in name or "proj_keyboard" in name:
            parameter.zero_()
    base = derive_config(pipeline.config, {"diffusion_model.transformer.network.action_blocks": 0}).setup()
    state = {key: value for key, value in transformer.state_dict().items() if "action_model" not in key}
    base.diffusion_model.transformer.load_state_dict(state)
    for ours, plain in zip(*(latents(each, picture, KEYS[:3], seed=7) for each in (pipeline, base)), strict=True):
        assert torch.equal(ours, plain)


def test_a_prompt_is_refused(pipeline, picture) -> None:
    with pytest.raises(ValueError, match="no prompt"):
        pipeline.rollout("a street at night", image=picture)
    rollout = pipeline.rollout(image=picture)
    next(rollout)
    with pytest.raises(ValueError, match="no prompt"):
        rollout.set_prompt("a street at night")


def test_actions_of_another_model_are_refused(pipeline, picture) -> None:
    network = pipeline.diffusion_model.transformer.network
    with pytest.raises(ValueError, match="moved by {'keys': 4, 'mouse': 2}"):
        network.prepare({"keys": torch.zeros(1, 3, 12, 7)})
    with pytest.raises(ValueError, match="actions are None"):
        network.prepare(None)


def test_the_context_made_anew_is_the_one_that_was(pipeline, picture) -> None:
    """As after a change of weights, here of none: two chunks, all in the window, from their latents and actions."""
    rollout = pipeline.rollout(image=picture, seed=8)
    for key in ("w", "look-up"):
        rollout.set_control(key)
        next(rollout)
    rollout.flush()
    state = rollout.cache.experts[0].branches[0].blocks[0].state
    parts = [part for cache in (state.mouse, state.keyboard) for part in (cache.k, cache.v)]
    before = [part.clone() for part in parts]
    for part in parts:
        part.fill_(7)
    with torch.no_grad():
        pipeline.diffusion_model.recache(rollout.cache)
    for part, want in zip(parts, before, strict=True):
        torch.testing.assert_close(part, want, rtol=1e-5, atol=1e-5)
