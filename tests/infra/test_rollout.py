"""What a rollout promises: it depends on its own arguments only, and repeats exactly."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashdreams.core.noise import GivenNoise, KeyedNoise
from flashdreams.infra.rollout import to_uint8
from template_model import template_pipeline

pytestmark = pytest.mark.ci_cpu


def latents(rollout):
    return [chunk.latent for chunk in rollout]


def same(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_interleaved_rollouts_of_different_sizes_are_bit_exact(pipeline, data):
    sizes = data.draw(st.lists(st.sampled_from([(16, 16), (32, 48), (48, 32), (64, 16)]), min_size=2, max_size=3))
    lengths = [data.draw(st.integers(1, 6)) for _ in sizes]
    options = [
        {"prompt": f"scene {i}", "seed": i, "num_chunk": n, "height": h, "width": w, "control": [0.3 * i] * 20}
        for i, ((h, w), n) in enumerate(zip(sizes, lengths, strict=True))
    ]
    alone = [latents(pipeline.rollout(**option)) for option in options]
    rollouts = [pipeline.rollout(**option) for option in options]
    mixed: list[list] = [[] for _ in options]
    order = data.draw(st.permutations([i for i, n in enumerate(lengths) for _ in range(n)]))
    for i in order:
        mixed[i].append(next(rollouts[i]).latent)
    assert all(same(a, b) for a, b in zip(alone, mixed, strict=True))


def test_repeated_predict_flow_gives_the_same_answer(pipeline):
    rollout = pipeline.rollout("a", seed=3, num_chunk=9)
    transformer = pipeline.diffusion_model.transformer
    for _ in range(5):
        next(rollout)
    rollout.flush()
    cache = rollout.cache.experts[0]
    x, t = torch.randn(1, 3, 2, 4, 6), torch.tensor([700.0])
    with torch.inference_mode():
        first = transformer.predict_flow(x, t, cache)
        transformer.predict_flow(torch.randn_like(x), torch.tensor([20.0]), cache)
        again = transformer.predict_flow(x, t, cache)
    assert torch.equal(first, again)


def test_a_batch_equals_single_runs(pipeline):
    prompts, controls = ["one", "two words", "and three words"], [[0.1] * 9, [], [-0.7] * 30]
    noise = KeyedNoise(5, ("a", "b", "c"))
    batch = latents(pipeline.rollout(prompts, num_chunk=5, noise=noise, control=controls))
    for i, prompt in enumerate(prompts):
        single = latents(
            pipeline.rollout(prompt, num_chunk=5, noise=KeyedNoise(5, (noise.sample_ids[i],)), control=controls[i])
        )
        for together, alone in zip(batch, single, strict=True):
            torch.testing.assert_close(together[i : i + 1], alone, rtol=1e-5, atol=1e-5)


def test_a_batch_in_another_order_has_the_same_noise(pipeline):
    forward = next(pipeline.rollout(["p", "p"], num_chunk=1, noise=KeyedNoise(5, ("a", "b"))))
    backward = next(pipeline.rollout(["p", "p"], num_chunk=1, noise=KeyedNoise(5, ("b", "a"))))
    torch.testing.assert_close(forward.latent, backward.latent.flip(0), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(forward.latent[0], forward.latent[1])


@pytest.mark.parametrize("rope", ["absolute", "cache_relative"])
def test_saved_loaded_in_a_new_process_and_continued_is_bit_exact(tmp_path, rope):
    pipeline = template_pipeline(rope=rope)
    whole = latents(pipeline.rollout("a red circle", seed=2**63 + 5, num_chunk=9))
    rollout = pipeline.rollout("a red circle", seed=2**63 + 5, num_chunk=9)
    for _ in range(6):
        next(rollout)
    rollout.save(tmp_path / "state.safetensors")
    script = (
        "import sys, torch; sys.path.insert(0, sys.argv[3])\n"
        "from template_model import template_pipeline\n"
        "torch.set_num_threads(int(sys.argv[4]))\n"
        "rollout = template_pipeline(rope=sys.argv[2]).resume(sys.argv[1] + '/state.safetensors', num_chunk=9)\n"
        "torch.save([chunk.latent for chunk in rollout], sys.argv[1] + '/rest.pt')\n"
    )
    support = str(Path(__file__).parents[1] / "support")
    threads = str(torch.get_num_threads())
    subprocess.run([sys.executable, "-c", script, str(tmp_path), rope, support, threads], check=True)
    assert same(torch.load(tmp_path / "rest.pt"), whole[6:])


def test_a_snapshot_of_another_model_is_refused_by_name(tmp_path, pipeline):
    rollout = pipeline.rollout("a", num_chunk=3)
    next(rollout)
    rollout.save(tmp_path / "state.safetensors")
    with pytest.raises(ValueError, match="another config"):
        template_pipeline(guidance_scale=2.0).resume(tmp_path / "state.safetensors")
    other = template_pipeline()
    other.diffusion_model.transformer.network.head.head.bias[0] += 1
    with pytest.raises(ValueError, match="another weights"):
        other.resume(tmp_path / "state.safetensors")
    (tmp_path / "junk").write_bytes(b"junk")
    with pytest.raises(ValueError, match="cannot read"):
        pipeline.resume(tmp_path / "junk")


def test_given_noise_and_its_snapshot(tmp_path, pipeline):
    noise = GivenNoise(torch.randn(1, 3, 5, 4, 6))
    whole = latents(pipeline.rollout("a", num_chunk=3, noise=noise))
    rollout = pipeline.rollout("a", num_chunk=3, noise=noise)
    next(rollout)
    rollout.save(tmp_path / "s")
    assert same(latents(pipeline.resume(tmp_path / "s", num_chunk=3)), whole[1:])
    with pytest.raises(ValueError, match=r"noise up to latent frame 7; 5 were given"):
        latents(pipeline.rollout("a", num_chunk=4, noise=noise))


def test_controls_steer_from_the_frame_they_are_given_for(pipeline):
    plain = latents(pipeline.rollout("a", seed=1, num_chunk=4))
    listed = latents(pipeline.rollout("a", seed=1, num_chunk=4, control=[0.0] * 9 + [0.9] * 8))
    called = latents(
        pipeline.rollout(
            "a", seed=1, num_chunk=4, control=lambda a, b: [0.9 if 9 <= f < 17 else None for f in range(a, b)]
        )
    )
    assert same(plain[:2], listed[:2]) and not torch.equal(plain[2], listed[2])
    assert same(listed, called)
    rollout = pipeline.rollout("a", seed=1, num_chunk=4)
    steered = [next(rollout).latent, next(rollout).latent]
    rollout.set_control(0.9)
    assert same(steered, plain[:2]) and torch.equal(next(rollout).latent, listed[2])


def test_set_prompt_changes_what_follows_only(pipeline):
    plain = latents(pipeline.rollout("a red circle", seed=1, num_chunk=4))
    rollout = pipeline.rollout("a red circle", seed=1, num_chunk=4)
    switched = [next(rollout).latent, next(rollout).latent]
    rollout.set_prompt("something else")
    switched += latents(rollout)
    assert same(switched[:2], plain[:2]) and not torch.equal(switched[2], plain[2])
    rollout = pipeline.rollout("a red circle", seed=1, num_chunk=4)
    next(rollout)
    rollout.set_prompt("a red circle")
    assert same(latents(rollout), plain[1:])


def test_first_image_is_kept_and_counts_as_context(pipeline):
    image = torch.randint(0, 256, (32, 48, 3), dtype=torch.uint8)
    chunks = list(pipeline.rollout("a", seed=1, num_chunk=3, image=image))
    cells = image.float().view(4, 8, 6, 8, 3).mean((1, 3))
    seen = chunks[0].frames[0].float()[4::8, 4::8]
    assert (seen - cells).abs().max() <= 1
    other = list(pipeline.rollout("a", seed=1, num_chunk=3, image=255 - image))
    assert not torch.equal(chunks[1].latent, other[1].latent)
    with pytest.raises(ValueError, match="resize it"):
        pipeline.rollout("a", image=image[:16])


def test_given_latents_end_at_a_chunk_boundary(pipeline):
    given_latents = torch.randn(1, 3, 4, 4, 6)
    chunks = latents(pipeline.rollout("a", num_chunk=4, initial_latents=given_latents))
    assert [c.shape[2] for c in chunks] == [2, 2, 2, 2]
    assert torch.equal(torch.cat(chunks[:2], 2), given_latents)


def test_recent_chunks_are_those_with_a_frame_in_sink_or_window(pipeline):
    rollout = pipeline.rollout("a", num_chunk=8)
    chunks = [next(rollout).latent for _ in range(8)]
    rollout.flush()
    recent = rollout.cache.recent["video"].chunks
    assert sorted(recent) == [0, 9, 11, 13], "a sink of 1, a ring of 6, chunks of 1, 2, 2, ... latent frames"
    assert all(torch.equal(latent, chunks[(first + 1) // 2]) for first, (latent, _) in recent.items())


def test_what_is_given_is_for_one_sample_or_for_each(pipeline):
    given = torch.randn(2, 3, 1, 4, 6)
    with pytest.raises(ValueError, match="initial_latents is given for 2 samples; this rollout has 3"):
        pipeline.rollout(["a", "b", "c"], initial_latents=given)
    assert torch.equal(next(pipeline.rollout(["a", "b"], initial_latents=given)).latent, given)
    one = next(pipeline.rollout(["a", "b"], initial_latents=given[:1])).latent
    assert torch.equal(one, given[:1].expand(2, -1, -1, -1, -1))


@pytest.mark.parametrize(("frames", "chunks"), [(1, 1), (2, 2), (9, 2), (10, 3), (17, 3)])
def test_a_length_in_frames_is_rounded_up_to_whole_chunks(pipeline, frames, chunks):
    """Chunks of 1, 2, 2, ... latent frames: 1, 9, 17, ... pixel frames in all."""
    assert pipeline.rollout("a", num_frames=frames).num_chunk == chunks
    assert pipeline.rollout("a", num_frames=10**9).num_chunk == 125_000_001, "found without counting up to it"


def test_misuse_is_named(pipeline):
    rollout = pipeline.rollout("a", num_chunk=2)
    rollout.close()
    assert list(rollout) == []
    with pytest.raises(ValueError, match="closed"):
        rollout.set_prompt("b")
    with pytest.raises(ValueError, match="num_chunk is 0"):
        pipeline.rollout("a", num_chunk=0)
    with pytest.raises(ValueError, match="30x48 is not a multiple of 16"):
        pipeline.rollout("a", height=30)
    cache = pipeline.initialize_cache(["a"])
    with pytest.raises(ValueError, match="out of order"):
        pipeline.generate(1, cache)
    pipeline.generate(0, cache)
    with pytest.raises(ValueError, match="waits for finalize"):
        pipeline.generate(0, cache)
    pipeline.finalize(0, cache)
    with pytest.raises(ValueError, match="finalize"):
        pipeline.finalize(1, cache)
    with pytest.raises(ValueError, match="samples"):
        next(pipeline.rollout(["a", "b"], num_chunk=1, control=[[0.1]]))


def test_closing_frees_the_memory(pipeline):
    import gc
    import weakref

    rollout = pipeline.rollout("a", num_chunk=2)
    next(rollout)
    buffer = weakref.ref(rollout.cache.experts[0].branches[0].blocks[0].self_kv.k)
    rollout.close()
    gc.collect()
    assert buffer() is None


def state_bytes(rollout) -> int:
    from flashdreams.infra.snapshot import _flatten

    tensors: dict[str, torch.Tensor] = {}
    _flatten(rollout.cache, tensors)
    return sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("rope", ["absolute", "cache_relative"])
def test_an_unbounded_rollout_has_a_constant_state(rope):
    rollout = template_pipeline(rope=rope).rollout("a", seed=1, control=lambda start, stop: [0.2] * (stop - start))
    sizes = set()
    for chunk in rollout:
        rollout.flush()
        if chunk.index >= 8:
            sizes.add(state_bytes(rollout))
        if chunk.index == 150:
            break
    assert len(sizes) == 1
    assert chunk.latent.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_frames_are_rounded_and_clamped_and_the_video_stays_as_it_is(dtype):
    """The video may be what a decoder keeps or a graph writes to, and bytes are made in place."""
    video = (torch.linspace(-1.5, 1.5, 3 * 2 * 4 * 5).reshape(1, 3, 2, 4, 5)).to(dtype)
    before = video.clone()
    frames = to_uint8(video)
    assert torch.equal(video, before)
    want = ((video.float().clamp(-1, 1) + 1) * 127.5).round().permute(0, 2, 3, 4, 1)
    assert frames.dtype == torch.uint8 and torch.equal(frames.float(), want)
    assert frames.min() == 0 and frames.max() == 255
