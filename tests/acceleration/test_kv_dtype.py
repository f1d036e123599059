"""The quantized rolling cache: half the memory, an error that is known, and everything else as before."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flashdreams.acceleration.kv_dtype import LARGEST, STORAGE, QuantizedKVCache, decode, encode
from flashdreams.core.kv_cache import CacheGeometry, RollingKVCache
from flashdreams.core.rope import rope_3d
from flashdreams.infra.acceleration_config import AccelerationConfig
from flashdreams.infra.errors import UserError
from flashdreams.infra.load import accelerate, load_pipeline
from flashdreams.infra.snapshot import SnapshotError
from template_model import template_pipeline

pytestmark = pytest.mark.ci_cpu

FORMS = list(STORAGE)
STEP = {"int8": 0.5 / 127, "fp8": 1 / 16}
"""Largest error: in int8, of half a step of 127 to the largest number; in fp8 of each number, half its last bit."""


def tensors(cache: RollingKVCache) -> list[Tensor]:
    return [value for value in vars(cache).values() if isinstance(value, Tensor)]


def size(cache: RollingKVCache) -> int:
    return sum(value.numel() * value.element_size() for value in tensors(cache))


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [1e-6, 1.0, 3e4])
def test_codes_are_as_near_as_their_format_allows(form, size):
    x = size * noise(2, 5, 3, 64)
    back = decode(*encode(x, STORAGE[form]), torch.float32)
    largest = x.abs().amax(-1, keepdim=True)
    bound = STEP[form] * (largest if form == "int8" else x.abs()) + largest * 2**-8  # the scale has eight bits
    assert ((back - x).abs() <= bound).all()


@pytest.mark.parametrize("form", FORMS)
def test_zeros_stay_zeros_and_no_code_is_beyond_the_largest(form):
    x = torch.cat((torch.zeros(1, 1, 1, 64), torch.full((1, 1, 1, 64), -2.7)), dim=1)
    codes, scale = encode(x, STORAGE[form])
    assert not decode(codes, scale, torch.float32)[:, 0].any()
    assert codes.float().abs().max() <= LARGEST[STORAGE[form]]
    torch.testing.assert_close(decode(codes, scale, torch.float32)[:, 1], x[:, 1], rtol=0.01, atol=0)


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_memory_is_half_of_bfloat16_with_all_scales_and_raw_sinks(form, relative):
    arguments = CacheGeometry(12, 3, 8, relative), 2, 4, 128, torch.bfloat16, "cpu"
    share = size(QuantizedKVCache(*arguments, storage=STORAGE[form])) / size(RollingKVCache(*arguments))
    assert share == pytest.approx(0.5 + 2 / 256)


@pytest.mark.parametrize("form", FORMS)
def test_slots_are_those_of_the_exact_cache(form):
    """Written in chunks past the window, with a sink that turns, each cache holds the same but for rounding."""
    geometry = CacheGeometry(5, 2, 3, relative=True)
    exact = RollingKVCache(geometry, 1, 2, 32, torch.float32, "cpu")
    coded = QuantizedKVCache(geometry, 1, 2, 32, torch.float32, "cpu", storage=STORAGE[form])
    for frame in range(9):
        raw, k, v = (noise(1, 3, 2, 32, seed=3 * frame + i) for i in range(3))
        slots = geometry.token_slots(frame, frame + 1)
        for cache in (exact, coded):
            if frame < 2:
                cache.write_raw_sink(raw, slots, 3)
            cache.write(k, v, slots)
            if frame >= 2:
                cache.rotate_sink(rope_3d(geometry.sink_positions(frame + 1), 1, 3, 32, 10000.0, torch.float32), 6)
    for mine, other in zip((*coded.read(15), *coded.gather(torch.tensor([14, 0, 7]))), (
        *exact.read(15), *exact.gather(torch.tensor([14, 0, 7]))
    ), strict=True):  # fmt: skip
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, other, rtol=0, atol=3 * STEP[form] * 4)
        assert not torch.equal(mine, other)


def latents(pipeline, num_chunk: int = 6) -> Tensor:
    return torch.cat([c.latent for c in pipeline.rollout("a red circle", seed=3, num_chunk=num_chunk)], dim=2)


def coded(form: str, **transformer: object):
    pipeline = template_pipeline(**transformer)
    accelerate(pipeline, AccelerationConfig(kv_dtype=form))
    return pipeline


@pytest.mark.parametrize("options", [{}, {"rope": "cache_relative"}, {"guidance_scale": 2.0}], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_a_rollout_past_the_window_is_near_the_exact_one(form, options):
    exact, near = latents(template_pipeline(**options)), latents(coded(form, **options))
    error = (near - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert 0 < error < {"int8": 0.005, "fp8": 0.03}[form]


@pytest.mark.parametrize("form", FORMS)
def test_a_prompt_is_recached_and_a_rollout_goes_on_from_a_file_to_the_bit(form, tmp_path):
    pipeline = coded(form)
    with pipeline.rollout("a red circle", seed=3, num_chunk=7) as rollout:
        for _ in range(4):
            next(rollout)
        rollout.set_prompt("a blue square", policy="recache")
        next(rollout)
        rollout.save(tmp_path / "state.safetensors")
        rest = [chunk.latent for chunk in rollout]
    again = [chunk.latent for chunk in pipeline.resume(tmp_path / "state.safetensors", num_chunk=7)]
    assert len(rest) == 2 and all(torch.equal(*pair) for pair in zip(rest, again, strict=True))
    with pytest.raises(SnapshotError, match="approximations"):
        template_pipeline().resume(tmp_path / "state.safetensors")


def test_repeating_a_prediction_changes_nothing():
    pipeline = coded("int8")
    cache = pipeline.initialize_cache(["a red circle"])
    pipeline.generate(0, cache)
    pipeline.finalize(0, cache)
    noisy = noise(*cache.layout.shape(1))
    flows = [
        pipeline.diffusion_model.transformer.predict_flow(noisy, torch.tensor([500.0]), cache.experts[0]) for _ in "ab"
    ]
    assert torch.equal(*flows)


def test_it_is_said_and_off_by_default():
    exact = load_pipeline("tiny-world", device="cpu")
    assert exact.acceleration.approximations == []
    near = load_pipeline("tiny-world", device="cpu", acceleration=AccelerationConfig(kv_dtype="int8"))
    (said,) = near.acceleration.approximations
    assert said.startswith("kv_dtype int8 (")
    cache = near.initialize_cache(["a red circle"]).experts[0].branches[0].blocks[0].self_kv
    assert isinstance(cache, QuantizedKVCache)


def test_a_model_without_rolling_caches_refuses():
    pipeline = template_pipeline(window_size_t=None, sink_size_t=0)
    with pytest.raises(UserError, match="keeps no keys and values"):
        accelerate(pipeline, AccelerationConfig(kv_dtype="int8"))
