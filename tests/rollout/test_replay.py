"""Replay gives the numbers of sampling again, one step or all, and refuses what was not so."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashdreams.core.noise import KeyedNoise
from flashdreams.infra.diffusion_model import VIDEO
from flashdreams.rollout import Kernel, PlanError, plan_for, predict_noise_at_step, replay, replay_each, rollout
from flashdreams.rollout.context import Context
from template_model import template_pipeline

pytestmark = pytest.mark.ci_cpu

SDE = Kernel("flow_sde", eta=0.7)
PROMPTS = ["a red circle", "two squares"]
CONTROL = [[0.02 * i for i in range(30)], [-0.5] * 30]


def switch(policy):
    """Other prompts from chunk 3 on, when the window is full."""

    def before(run, index):
        if index == 3:
            run.set_prompt(["a blue star", "three lines"], policy=policy)

    return before


def sampled(pipeline, *, num_chunk=6, policy=None, **plan):
    plan = plan_for(pipeline, **{"sde": SDE, **plan})
    before = switch(policy) if policy else None
    return rollout(pipeline, PROMPTS, plan, num_chunk=num_chunk, seed=3, control=CONTROL, before=before)


@pytest.mark.parametrize("storage_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "options",
    [{}, {"guidance_scale": 2.5}, {"guidance_scale": 2.5, "cfg": "sequential"}, {"rope": "cache_relative"},
     {"context_noise": 0.1, "sink_size_t": 0}, {"dtype": "bfloat16"}],
    ids=str,
)  # fmt: skip
def test_every_log_probability_equals_the_sampled_one(options, storage_dtype):
    """Eleven latent frames in a window of seven, so that some were evicted."""
    pipeline = template_pipeline(**options)
    segment = sampled(pipeline, storage_dtype=storage_dtype)
    assert len(segment.scored) == 12
    assert torch.equal(replay(pipeline, segment).log_probs, segment.log_probs())


@pytest.mark.parametrize("policy", ["keep", "recache", "reset"])
def test_a_changed_prompt_is_replayed_with_what_became_of_the_context(pipeline, policy):
    segment = sampled(pipeline, policy=policy)
    assert torch.equal(replay(pipeline, segment).log_probs, segment.log_probs())
    segment.chunks[3].events[0].policy = {"keep": "recache", "recache": "keep", "reset": "keep"}[policy]
    if policy == "reset":
        with pytest.raises(PlanError, match="chunk 3 was made with 2 latent frames in sight; replay would have 7"):
            replay(pipeline, segment)
    else:
        assert not torch.equal(replay(pipeline, segment).log_probs, segment.log_probs())


def test_loras_are_those_of_each_chunk(fresh):
    shapes = {"A": (4, 48), "B": (48, 4)}
    weights = {
        f"transformer.blocks.0.{layer}.lora_{side}.weight": torch.randn(shapes[side])
        for layer in ("attn1.to_v", "attn2.to_k") for side in "AB"
    }  # fmt: skip
    fresh.loras.load("style", weights, weight=0.5)

    def before(run, index):
        if index == 2:
            run.set_loras({"style": 1.0})

    segment = rollout(fresh, PROMPTS, plan_for(fresh, sde=SDE), num_chunk=4, seed=3, before=before)
    assert [chunk.loras for chunk in segment.chunks] == [{"style": 0.5}] * 2 + [{"style": 1.0}] * 2
    assert torch.equal(replay(fresh, segment).log_probs, segment.log_probs())


def test_one_step_alone_equals_its_entry_of_the_whole(pipeline):
    segment = sampled(pipeline, policy="recache", storage_dtype="bfloat16")
    whole = replay(pipeline, segment)
    for entry in [(0, 1), (3, 0), (5, 1)]:
        alone, place = replay(pipeline, segment, [entry]), whole.entries.index(entry)
        assert torch.equal(alone.log_probs[:, 0], whole.log_probs[:, place])
        assert torch.equal(alone.means[0], whole.means[place])
        assert torch.equal(alone.velocities[0], whole.velocities[place])
    assert replay(pipeline, segment, [(5, 1), (0, 0)]).entries == [(5, 1), (0, 0)]


def test_gradients_change_no_number(fresh):
    segment = sampled(fresh, policy="recache", storage_dtype="bfloat16")
    fresh.diffusion_model.requires_grad_(True)
    for context_grad in ("detached", "full"):
        result = replay(fresh, segment, context_grad=context_grad)
        assert torch.equal(result.log_probs, segment.log_probs())
        assert result.log_probs.requires_grad
        assert result.means[0].dtype == torch.float32
    with torch.no_grad():
        assert not replay(fresh, segment).log_probs.requires_grad


def test_step_by_step_the_gradients_are_those_of_the_whole(fresh):
    segment = sampled(fresh)
    network = fresh.diffusion_model.transformer.network
    fresh.diffusion_model.requires_grad_(True)
    replay(fresh, segment).log_probs.sum().backward()
    whole = [parameter.grad.clone() for parameter in network.parameters()]
    fresh.diffusion_model.zero_grad()
    for scored in replay_each(fresh, segment):
        scored.log_prob.sum().backward()
    for parameter, gradient in zip(network.parameters(), whole, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)
    assert all(gradient.abs().sum() > 0 for gradient in whole), "text, time and controls take part"


def test_velocities_change_no_context(pipeline):
    """However often and wherever a flow is asked for, the committed frames and what follows are the same."""
    segment = sampled(pipeline, num_chunk=4)
    context = Context(pipeline, segment, "none")
    timestep = torch.full((2,), 500.0)
    with torch.no_grad():
        for chunk in segment.chunks[:3]:
            context.enter(chunk)
            context.commit(chunk)
        context.enter(segment.chunks[3])
        expert = context.cache.experts[0]
        geometry = expert.branches[0].blocks[0].self_kv.geometry
        seen = [frame for frame in range(expert.start) if frame < 1 or frame >= 7 - geometry.ring]
        slots = torch.cat([geometry.token_slots(frame, frame + 1) for frame in seen])
        before = [block.self_kv.gather(slots) for block in expert.branches[0].blocks]
        first = context.flow(segment.chunks[3].state(0), timestep, 0.5)
        context.flow(torch.randn(2, 3, 2, 4, 6), timestep + 300, 0.8)
        again = context.flow(segment.chunks[3].state(0), timestep, 0.5)
        after = [block.self_kv.gather(slots) for block in expert.branches[0].blocks]
    assert torch.equal(first, again)
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old[0], new[0]) and torch.equal(old[1], new[1])


def test_another_context_chunk_changes_what_follows_it_and_nothing_before(pipeline):
    segment = sampled(pipeline)
    before = replay(pipeline, segment)
    segment.chunks[2].clean = {VIDEO: torch.randn_like(segment.chunks[2].clean[VIDEO])}
    after = replay(pipeline, segment)
    assert torch.equal(before.log_probs[:, :6], after.log_probs[:, :6])
    pairs = zip(before.velocities[6:], after.velocities[6:], strict=True)
    assert not any(torch.allclose(one, other, rtol=1e-6, atol=1e-6) for one, other in pairs)


def test_permuting_samples_permutes_results(pipeline):
    segment = sampled(pipeline)
    swapped = replay(pipeline, segment.select([1, 0])).log_probs
    torch.testing.assert_close(swapped, segment.log_probs()[[1, 0]], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(swapped, segment.log_probs(), rtol=1e-3)


def test_controls_take_part(pipeline):
    segment = sampled(pipeline)
    segment.chunks[4].controls = [[{"number": -1.0}] * len(row) for row in segment.chunks[4].controls]
    assert not torch.equal(replay(pipeline, segment, [(4, 0)]).log_probs, segment.log_probs([(4, 0)]))


def tamper_kv(segment):
    segment.chunks[2].kv_length = 4


def tamper_sigma(segment):
    segment.chunks[1].sigmas = (1.0, 0.7, 0.0)


def tamper_gap(segment):
    del segment.chunks[1]


def tamper_weights(segment):
    segment.chunks[1].weight_version = 7


def tamper_steps(segment):
    segment.chunks[0].steps = (0,)


def tamper_digest(segment):
    segment.digest = "0" * 64


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (tamper_kv, "chunk 2 was made with 4 latent frames in sight; replay would have 5"),
        (tamper_sigma, "sigma 1 was 0.7 where it ran; the plan has 0.75"),
        (tamper_gap, "entry 1 of the segment is chunk 2"),
        (tamper_weights, "chunk 1 was made with version 7 of the weights; they are at version 0"),
        (tamper_steps, r"chunk 0 drew noise at steps \[0\]; the plan has \[0, 1\]"),
        (tamper_digest, "the one that ran had 000000000000"),
    ],
)
def test_what_was_not_so_is_refused(pipeline, tamper, message):
    segment = sampled(pipeline, num_chunk=3)
    tamper(segment)
    with pytest.raises(PlanError, match=message):
        replay(pipeline, segment, [(0, 0)])


def test_another_setup_and_other_weights_are_refused(fresh):
    segment = sampled(fresh, num_chunk=2)
    with pytest.raises(PlanError, match=r"window_size_t \(7, here 9\)"):
        replay(template_pipeline(window_size_t=9), segment)
    fresh.diffusion_model.weights_changed()
    with pytest.raises(PlanError, match="say weights='any'"):
        replay(fresh, segment)
    assert torch.equal(replay(fresh, segment, weights="any").log_probs, segment.log_probs())


def test_a_step_that_drew_no_noise_has_no_score(pipeline):
    segment = sampled(pipeline, num_chunk=2, stochastic=[0])
    with pytest.raises(KeyError, match="step 1 of chunk 0 drew no noise"):
        replay(pipeline, segment, [(0, 1)])
    assert replay(pipeline, segment, []).log_probs.shape == (2, 0)


@pytest.mark.parametrize(("option", "value"), [("mode", "fast"), ("context_grad", "some")])
def test_unknown_ways_are_named(pipeline, option, value):
    with pytest.raises(ValueError, match=f"{option} is '{value}'"):
        replay(pipeline, sampled(pipeline, num_chunk=1), **{option: value})


def test_the_flow_of_a_noised_chunk_is_the_networks_in_clean_context(pipeline):
    """At the sample and level of a step that ran, it is that step's velocity."""
    segment = sampled(pipeline)
    step = segment.plan.steps[1]
    samples = [chunk.state(1) for chunk in segment.chunks]
    flows = predict_noise_at_step(pipeline, segment, samples, torch.full((2,), step.sigma))
    want = replay(pipeline, segment, [(chunk.index, 1) for chunk in segment.chunks]).velocities
    assert all(torch.equal(flow, velocity) for flow, velocity in zip(flows, want, strict=True))


def test_noise_levels_may_differ_between_samples_and_chunks(pipeline):
    segment = sampled(pipeline, num_chunk=3)
    clean = [segment.chunks[i].clean[VIDEO] for i in (1, 2)]
    noise = KeyedNoise(9, ("0", "1")).initial(0, 0, clean[0].shape)
    sigma = torch.tensor([[0.2, 0.9], [0.7, 0.4]])
    at = lambda n, level: (1 - level) * clean[n] + level * noise  # noqa: E731
    samples = [at(n, sigma[:, n].view(2, 1, 1, 1, 1)) for n in (0, 1)]
    together = predict_noise_at_step(pipeline, segment, samples, sigma, chunks=[1, 2])
    for row in (0, 1):
        alone = predict_noise_at_step(
            pipeline, segment.select([row]), [x[row : row + 1] for x in samples], sigma[row : row + 1], chunks=[1, 2]
        )
        for flow, single in zip(together, alone, strict=True):
            torch.testing.assert_close(flow[row : row + 1], single, rtol=1e-5, atol=1e-5)
    for level in (0.0, 1.5, float("nan")):
        with pytest.raises(ValueError, match=r"expected levels in \(0, 1\]"):
            predict_noise_at_step(pipeline, segment, samples, torch.full((2, 2), level), chunks=[1, 2])
    with pytest.raises(ValueError, match=r"sigma \[3\] were given for 2 chunks of a batch of 2"):
        predict_noise_at_step(pipeline, segment, samples, torch.rand(3), chunks=[1, 2])
    with pytest.raises(ValueError, match="expected rising numbers"):
        predict_noise_at_step(pipeline, segment, samples, sigma, chunks=[2, 1])


def test_a_segment_of_mixed_weights_is_refused_unless_asked_for(fresh):
    plan = plan_for(fresh, sde=SDE)
    update = lambda run, index: fresh.diffusion_model.weights_changed() if index == 1 else None  # noqa: E731
    segment = rollout(fresh, PROMPTS, plan, num_chunk=3, seed=3, before=update)
    assert [chunk.weight_version for chunk in segment.chunks] == [0, 1, 1]
    with pytest.raises(PlanError, match="chunk 0 was made with version 0"):
        replay(fresh, segment)
    assert replay(fresh, segment, weights="any").log_probs.shape == (2, 6)
    assert replace(segment, digest=segment.digest).scored == segment.scored
