"""A new prompt in the middle of a rollout, and what becomes of the context."""

from __future__ import annotations

import pytest
import torch

from template_model import template_pipeline

pytestmark = pytest.mark.ci_cpu


@pytest.fixture(scope="module", params=["absolute", "cache_relative"])
def switched(request):
    return template_pipeline(rope=request.param, guidance_scale=2.0)


def keys(rollout) -> torch.Tensor:
    rollout.flush()
    return torch.stack([block.self_kv.k for block in rollout.cache.experts[0].branches[0].blocks])


def make(rollout, chunks: int) -> torch.Tensor:
    return torch.cat([next(rollout).latent for _ in range(chunks)], dim=2)


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_recache_is_as_if_the_context_had_been_given_with_the_new_prompt(switched, chunks):
    rollout = switched.rollout("a", seed=3, control=lambda start, stop: [0.5] * (stop - start))
    begun = make(rollout, chunks)
    assert begun.shape[2] <= 7, "nothing has left the window yet"
    rollout.set_prompt("b", policy="recache")
    told = switched.rollout("b", seed=3, initial_latents=begun, control=lambda start, stop: [0.5] * (stop - start))
    make(told, chunks)
    torch.testing.assert_close(keys(rollout), keys(told), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(make(rollout, 3), make(told, 3), rtol=1e-5, atol=1e-5)


def test_recache_under_the_same_prompt_changes_nothing_before_eviction(switched):
    rollout = switched.rollout("a")
    make(rollout, 3)
    before = keys(rollout).clone()
    rollout.set_prompt("a", policy="recache")
    torch.testing.assert_close(keys(rollout), before, rtol=1e-5, atol=1e-5)


def test_recache_depends_on_nothing_but_the_latents_in_the_window(switched):
    """Whatever the cache held: after a recache, it is a function of the recent latents and the prompt."""
    rollout = switched.rollout("a")
    make(rollout, 9)
    assert rollout.cache.experts[0].start > 12
    rollout.flush()
    rollout.set_prompt("b", policy="recache")
    want = keys(rollout).clone()
    for branch in rollout.cache.experts[0].branches:
        for block in branch.blocks:
            block.self_kv.k.add_(7), block.self_kv.v.fill_(100)
    rollout.set_prompt("b", policy="recache")
    assert torch.equal(keys(rollout), want)
    assert torch.isfinite(make(rollout, 2)).all()


def test_keep_leaves_the_context_and_changes_what_follows(switched):
    rollout, same = switched.rollout("a"), switched.rollout("a")
    make(rollout, 2), make(same, 2)
    before = keys(rollout).clone()
    rollout.set_prompt("b", policy="keep")
    assert torch.equal(keys(rollout), before)
    assert (make(rollout, 1) - make(same, 1)).abs().max() > 1e-4


def test_reset_forgets_what_came_before(switched):
    rollouts = [switched.rollout(prompt, seed=5) for prompt in ("a", "b")]
    for rollout in rollouts:
        make(rollout, 6)
        rollout.set_prompt("c", policy="reset")
        rollout.flush()
        assert not rollout.cache.recent["video"].chunks
    first, second = (make(rollout, 6) for rollout in rollouts)
    assert torch.equal(first, second)
    assert rollouts[0].cache.recent["video"].chunks.keys() <= set(range(12)), "counted from the cut"


def test_a_recached_rollout_is_saved_and_goes_on_bit_for_bit(switched, tmp_path):
    rollout = switched.rollout("a")
    make(rollout, 4)
    rollout.set_prompt("b", policy="reset")
    make(rollout, 2)
    rollout.set_prompt("c", policy="recache")
    rollout.save(tmp_path / "state")
    resumed = switched.resume(tmp_path / "state")
    assert torch.equal(make(rollout, 3), make(resumed, 3))
    resumed.set_prompt("d", policy="recache")
    rollout.set_prompt("d", policy="recache")
    assert torch.equal(make(rollout, 2), make(resumed, 2))


def test_the_sink_may_keep_the_old_prompt():
    pipeline = template_pipeline(recache_sink=False)
    assert pipeline.config.diffusion_model.transformer.sink_size_t == 1
    rollout = pipeline.rollout("a")
    make(rollout, 3)
    before, tokens = keys(rollout).clone(), rollout.cache.layout.height * rollout.cache.layout.width // 4
    rollout.set_prompt("b", policy="recache")
    after = keys(rollout)
    assert torch.equal(after[:, :, :tokens], before[:, :, :tokens])
    assert not torch.equal(after[1:, :, tokens : 5 * tokens], before[1:, :, tokens : 5 * tokens])


def test_a_batch_takes_a_prompt_for_each_sample(switched):
    rollout = switched.rollout(["a", "b"])
    make(rollout, 1)
    with pytest.raises(ValueError, match="1 prompts were given; this rollout has 2 samples"):
        rollout.set_prompt(["c"])
    with pytest.raises(ValueError, match="policy is 'forget'; expected keep, recache or reset"):
        rollout.set_prompt("c", policy="forget")
    rollout.set_prompt(["c", "d"], policy="recache")
    assert make(rollout, 1).shape[0] == 2


def test_a_reset_that_the_model_refuses_changes_nothing(switched, monkeypatch):
    rollout, same = switched.rollout("a"), switched.rollout("a")
    make(rollout, 2), make(same, 2)

    def refuse(layout, conditions):
        raise ValueError("no image was given")

    with monkeypatch.context() as patch:
        patch.setattr(switched.diffusion_model, "initialize_cache", refuse)
        with pytest.raises(ValueError, match="no image"):
            rollout.set_prompt("b", policy="reset")
    assert torch.equal(make(rollout, 2), make(same, 2))
    assert rollout.cache.conditions.to_dict().keys() == same.cache.conditions.to_dict().keys()


def test_a_model_that_cannot_make_its_context_anew_keeps_no_chunks_and_says_so(pipeline, monkeypatch):
    monkeypatch.setattr(type(pipeline.diffusion_model.transformer), "can_recommit", False)
    rollout = pipeline.rollout("a", num_chunk=3)
    next(rollout)
    rollout.flush()
    assert not rollout.cache.recent
    before = rollout.cache.conditions
    with pytest.raises(ValueError, match="cannot make its context anew; use policy keep or reset"):
        rollout.set_prompt("b", policy="recache")
    assert rollout.cache.conditions is before
    rollout.set_prompt("b", policy="keep")
    next(rollout)
