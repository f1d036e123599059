"""A recorded rollout is the rollout that serves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashdreams.core.noise import GivenNoise, KeyedNoise
from flashdreams.infra.diffusion_model import VIDEO
from flashdreams.infra.scheduler import FewStepSchedulerConfig, UniPCSchedulerConfig
from flashdreams.recipes.template.config import PIPELINE_TEMPLATE
from flashdreams.recipes.wan.conditions import WanConditions
from flashdreams.rollout import Kernel, PlanError, Segment, decode, plan_for, record, replay, rollout, trainer_facts
from template_model import template_pipeline

pytestmark = pytest.mark.ci_cpu

SDE = Kernel("flow_sde", eta=0.7)
PROMPTS = ["a red circle", "two squares"]
CONTROL = [[0.3] * 30, [-0.5] * 30]


def few_step(scheduler=FewStepSchedulerConfig()):  # noqa: B008 (frozen)
    model = replace(PIPELINE_TEMPLATE.diffusion_model, scheduler=scheduler)
    return replace(PIPELINE_TEMPLATE, diffusion_model=model).setup()


def unipc():
    return few_step(UniPCSchedulerConfig(num_steps=4))


def latents(segment):
    return [chunk.clean[VIDEO] for chunk in segment.chunks]


def equal(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("make", [template_pipeline, few_step, unipc])
def test_a_plan_of_serving_makes_the_latents_of_serving_to_the_bit(make):
    """Euler's steps; re-noising to the next level, which is the kernel cps at eta 1; a solver with a history."""
    pipeline = make()
    segment = rollout(pipeline, PROMPTS, plan_for(pipeline), num_chunk=5, seed=3, control=CONTROL)
    assert equal(latents(segment), [c.latent for c in pipeline.rollout(PROMPTS, num_chunk=5, seed=3, control=CONTROL)])
    per_chunk = 3 if make is few_step else 0
    assert len(segment.scored) == 5 * per_chunk


def test_only_samples_around_stochastic_steps_are_kept(pipeline):
    segment = rollout(pipeline, PROMPTS, plan_for(pipeline, sde=SDE, stochastic=[[1], [], [0]]), num_chunk=3, seed=3)
    assert [chunk.positions for chunk in segment.chunks] == [(1, 2), (), (0, 1)]
    assert segment.scored == [(0, 1), (2, 0)]
    assert segment.log_probs().shape == (2, 2)
    assert torch.equal(segment.chunks[0].state(2), latents(segment)[0])
    with pytest.raises(KeyError, match=r"sample 0 of chunk 0 was not kept; kept: \[1, 2\]"):
        segment.chunks[0].state(0)
    with pytest.raises(KeyError, match="step 1 of chunk 2 drew no noise"):
        segment.log_probs([(2, 1)])


def test_the_log_probability_is_that_of_the_noise_that_was_drawn(pipeline):
    """In float32 storage: the sample is the mean and std times the noise, so its density is known from the noise."""
    segment = rollout(pipeline, PROMPTS, plan_for(pipeline, sde=SDE), num_chunk=2, seed=3)
    for chunk in segment.chunks:
        for column, step in enumerate(segment.plan.steps):
            shape = chunk.clean[VIDEO].shape
            noise = segment.noise.step(chunk.index, step.index, chunk.start, shape).double()
            std = SDE.std(step.sigma, step.sigma_next)
            density = torch.distributions.Normal(0, std).log_prob(std * noise).flatten(1).mean(1)
            torch.testing.assert_close(chunk.log_probs[:, column].double(), density, rtol=1e-5, atol=1e-5)


def test_samples_are_rounded_to_the_storage_dtype_between_steps(pipeline):
    segment = rollout(pipeline, PROMPTS, plan_for(pipeline, sde=SDE, storage_dtype="bfloat16"), num_chunk=2, seed=3)
    for chunk in segment.chunks:
        assert chunk.states[VIDEO].dtype == torch.bfloat16
        assert torch.equal(chunk.clean[VIDEO].bfloat16().float(), chunk.clean[VIDEO])


def test_a_group_shares_its_start_noise_and_nothing_else(pipeline):
    plan = plan_for(pipeline, sde=SDE)
    segment = rollout(
        pipeline, ["p"] * 3, plan, num_chunk=2, seed=5, sample_ids=["a", "b", "c"], group_ids=["g", "g", "h"]
    )
    for chunk in segment.chunks:
        first, second, other = chunk.state(0)
        assert torch.equal(first, second)
        assert not torch.equal(first, other)
        assert not torch.equal(*chunk.state(1)[:2])


def test_groups_outlive_a_snapshot(pipeline, tmp_path):
    noise = KeyedNoise(5, ("a", "b"), group_ids=("g", "g"))
    whole = [chunk.latent for chunk in pipeline.rollout(["p", "q"], num_chunk=3, noise=noise)]
    begun = pipeline.rollout(["p", "q"], num_chunk=3, noise=noise)
    next(begun)
    begun.save(tmp_path / "state")
    assert equal(whole[1:], [chunk.latent for chunk in pipeline.resume(tmp_path / "state", num_chunk=3)])
    with pytest.raises(ValueError, match="1 group ids were given for 2 sample ids"):
        KeyedNoise(5, ("a", "b"), group_ids=("g",))


def test_a_snapshot_holds_no_plan_and_says_so(pipeline, tmp_path):
    run = pipeline.rollout(["p"], num_chunk=3)
    record(run, plan_for(pipeline, sde=SDE))
    next(run)
    with pytest.raises(ValueError, match="save its segment instead"):
        run.save(tmp_path / "state")


def test_a_samples_noise_does_not_depend_on_its_batch(pipeline):
    plan = plan_for(pipeline, sde=SDE)
    three = rollout(pipeline, ["p"] * 3, plan, num_chunk=3, seed=5, sample_ids=["a", "b", "c"])
    alone = rollout(pipeline, ["p"], plan, num_chunk=3, seed=5, sample_ids=["b"])
    assert torch.equal(three.chunks[2].state(0)[1:2], alone.chunks[2].state(0))
    torch.testing.assert_close(three.log_probs()[1:2], alone.log_probs(), rtol=1e-5, atol=1e-5)


def test_decoding_a_segment_gives_the_frames_of_the_stream(pipeline):
    shown = []
    segment = rollout(
        pipeline, PROMPTS, plan_for(pipeline), num_chunk=4, control=CONTROL, on_chunk=lambda c: shown.append(c.frames)
    )
    assert torch.equal(decode(pipeline, segment), torch.cat(shown, dim=1))


def test_a_file_holds_all_of_it(pipeline, tmp_path):
    plan = plan_for(pipeline, sde=SDE, storage_dtype="bfloat16")

    def switch(run, index):
        if index == 2:
            run.set_prompt(["x", "y z"], policy="recache")

    segment = rollout(pipeline, PROMPTS, plan, num_chunk=4, seed=2**63 + 1, control=CONTROL, before=switch)
    segment.save(tmp_path / "segment.safetensors")
    loaded = Segment.load(tmp_path / "segment.safetensors")
    assert loaded.plan == plan
    assert loaded.noise == segment.noise == KeyedNoise(2**63 + 1, ("0", "1"))
    assert loaded.prompts == PROMPTS
    assert loaded.chunks[2].events[0].prompts == ["x", "y z"]
    assert torch.equal(loaded.log_probs(), segment.log_probs())
    assert torch.equal(replay(pipeline, loaded).log_probs, segment.log_probs())


def test_a_file_whose_plan_is_not_the_one_that_ran_is_refused(pipeline, tmp_path):
    segment = rollout(pipeline, PROMPTS, plan_for(pipeline, sde=SDE), num_chunk=1)
    replace(segment, plan=plan_for(pipeline)).save(tmp_path / "segment.safetensors")
    with pytest.raises(ValueError, match="is not the one that ran"):
        Segment.load(tmp_path / "segment.safetensors")
    (tmp_path / "other").write_bytes(b"no file of tensors")
    with pytest.raises(ValueError, match="cannot read a segment"):
        Segment.load(tmp_path / "other")


def test_segments_are_joined_and_taken_apart(pipeline):
    plan = plan_for(pipeline, sde=SDE)
    both = [rollout(pipeline, PROMPTS, plan, num_chunk=2, seed=seed, control=CONTROL) for seed in (1, 1)]
    joined = Segment.concat(both)
    assert joined.batch_size == 4
    assert torch.equal(joined.select([1, 2]).log_probs(), joined.log_probs()[[1, 2]])
    other = rollout(pipeline, PROMPTS, plan, num_chunk=3, seed=1)
    with pytest.raises(ValueError, match="chunks has 2 and 3 entries"):
        Segment.concat([both[0], other])
    with pytest.raises(ValueError, match="Segment.seed differs"):
        Segment.concat([both[0], replace(both[1], seed=2)])


def test_given_noise_is_not_kept_and_asked_for_again(pipeline):
    noise = GivenNoise(
        torch.randn(1, 3, 3, 4, 6), {(c, s): torch.randn(1, 3, 1 + (c > 0), 4, 6) for c in (0, 1) for s in (0, 1)}
    )
    segment = rollout(pipeline, ["a"], plan_for(pipeline, sde=SDE), num_chunk=2, noise=noise)
    assert torch.equal(segment.chunks[1].state(0), noise.frames[:, :, 1:3])
    with pytest.raises(ValueError, match="give it again"):
        segment.noise  # noqa: B018 (raises)


def test_given_first_frames_are_context_and_not_scored(pipeline):
    given = torch.randn(1, 3, 3, 4, 6)
    plan = plan_for(pipeline, sde=SDE)
    segment = rollout(pipeline, ["a"], plan, num_chunk=4, initial_latents=given)
    assert [chunk.steps for chunk in segment.chunks] == [(), (), (0, 1), (0, 1)]
    assert torch.equal(replay(pipeline, segment).log_probs, segment.log_probs())


def test_frames_that_stand_in_the_sample_are_masked():
    """As in Wan2.2 TI2V: the first latent frame is known at every step, so nothing was drawn there."""
    pipeline = template_pipeline(stamp_image_latent=True, first_len_t=2)
    text = pipeline.encode_prompts(["a"]).text
    conditions = WanConditions(text=text, image_latent=torch.randn(1, 3, 1, 4, 6))
    segment = rollout(
        pipeline, ["a"], plan_for(pipeline, sde=SDE, storage_dtype="bfloat16"), num_chunk=3, conditions=conditions
    )
    assert segment.chunks[0].mask.flatten().tolist() == [False, True]
    assert segment.chunks[1].mask is None
    assert torch.equal(segment.chunks[0].clean[VIDEO][:, :, :1], conditions.image_latent)
    assert torch.equal(replay(pipeline, segment).log_probs, segment.log_probs())


def test_a_record_begins_with_the_first_chunk_and_the_right_plan(pipeline):
    run = pipeline.rollout("a", num_chunk=3)
    next(run)
    with pytest.raises(ValueError, match="a record begins with the first"):
        record(run, plan_for(pipeline))
    with pytest.raises(PlanError, match="another setup"):
        rollout(pipeline, ["a"], plan_for(template_pipeline(window_size_t=9)), num_chunk=1)


def test_rollouts_see_the_weights_of_an_optimisers_step(fresh):
    plan = plan_for(fresh, sde=SDE)
    model, network = fresh.diffusion_model, fresh.diffusion_model.transformer.network
    before = rollout(fresh, ["a"], plan, num_chunk=3, seed=1)
    running = fresh.rollout("a", num_chunk=4, seed=1)
    first = next(running).latent
    model.requires_grad_(True)
    replay(fresh, before).log_probs.sum().backward()
    torch.optim.SGD(network.parameters(), lr=0.5).step()
    model.weights_changed()
    model.requires_grad_(False)
    other = template_pipeline()
    other.diffusion_model.transformer.network.load_state_dict(network.state_dict())
    after = rollout(fresh, ["a"], plan, num_chunk=3, seed=1)
    assert equal(latents(after), latents(rollout(other, ["a"], plan, num_chunk=3, seed=1)))
    assert not equal(latents(after), latents(before))
    assert [chunk.weight_version for chunk in after.chunks] == [1, 1, 1]

    second = next(running).latent  # a rollout that runs: its context is made anew under the new weights
    begun = other.rollout("a", num_chunk=4, seed=1, initial_latents=first)
    next(begun)
    assert torch.equal(second, next(begun).latent)


def test_a_snapshot_of_other_weights_is_refused(fresh, tmp_path, monkeypatch):
    """Also where they came from a file, whose digest says nothing about them any more."""
    monkeypatch.setattr(fresh, "checkpoint_digests", lambda: {"transformer.0": "digest of a file"})
    run = fresh.rollout("p", num_chunk=3)
    next(run)
    run.save(tmp_path / "state")
    with torch.no_grad():
        fresh.diffusion_model.transformer.network.head.head.bias.add_(1)
    fresh.diffusion_model.weights_changed()
    with pytest.raises(ValueError, match="because of another weights"):
        fresh.resume(tmp_path / "state")


def test_facts_for_trainers_name_what_is_there(pipeline):
    facts = trainer_facts(pipeline)
    state = pipeline.state_dict()
    assert all(f"{facts.weight_sync_prefix}{name}" in state for name in facts.trainable_module.state_dict())
    assert facts.no_split_modules == ("WanBlock",)
    assert facts.latent_shape == (3, 2, 4, 6)
    linear = [name for name, module in facts.trainable_module.named_modules() if isinstance(module, torch.nn.Linear)]
    for target in facts.lora_targets:
        assert sum(name.endswith(target) for name in linear) == 2, target
