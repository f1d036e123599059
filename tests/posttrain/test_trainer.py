"""A training is the same however often it is ended and resumed, begins on policy, and its LoRA serves as it trained."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from flashdreams.infra.errors import UserError
from flashdreams.posttrain.journal import FILE
from flashdreams.posttrain.sampling import sample_groups
from flashdreams.rollout.losses import Loss
from template_model import template_pipeline

pytestmark = pytest.mark.ci_cpu


def lines(folder):
    """The journal, without what a clock says."""
    read = [json.loads(line) for line in (folder / FILE).read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.endswith("_seconds")} for line in read]


def same(a, b):
    """Equal to the bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("algorithm", ["grpo", "nft"])
def test_killed_and_resumed_equals_uninterrupted_to_the_bit(training, tmp_path, algorithm):
    options = {"updates": 2, "iterations": 3, "eval_samples": 1, "eval_chunks": 1, "eval_every": 2}
    whole = training(tmp_path / "whole", algorithm, **options)
    whole.run()
    first = training(tmp_path / "parts", algorithm, **options)
    first.evaluate()
    first.step()
    first.save()
    first.step()  # killed before it is saved: the journal is a line ahead of the state
    del first
    second = training(tmp_path / "parts", algorithm, resume=True, **options)
    assert second.iteration == 1
    second.run()
    assert same(second.weights.state_dict(), whole.weights.state_dict())
    for name in ("state.safetensors", "lora.safetensors"):
        assert same(load_file(tmp_path / "parts" / name), load_file(tmp_path / "whole" / name))
    assert lines(tmp_path / "parts") == lines(tmp_path / "whole")
    assert any(value.any() for name, value in whole.weights.state_dict().items() if "lora_B" in name)


def test_the_first_update_of_grpo_is_on_policy_to_the_bit_and_the_second_is_not(training, tmp_path):
    training(tmp_path / "one", "grpo", iterations=1).run()
    (first,) = lines(tmp_path / "one")
    assert first["ratio_min"] == first["ratio_max"] == 1.0
    assert first["log_prob_change_max"] == first["clip_fraction"] == 0.0
    training(tmp_path / "two", "grpo", iterations=1, updates=2, clip=1e-7).run()
    (second,) = lines(tmp_path / "two")
    assert second["ratio_min"] < second["ratio_max"] and second["clip_fraction"] > 0
    assert second["log_prob_change_max"] > 0


def test_the_old_flow_of_nft_is_that_of_the_weights_that_sampled(training, tmp_path):
    training(tmp_path / "one", iterations=1).run()
    training(tmp_path / "two", iterations=1, updates=2).run()
    assert lines(tmp_path / "one")[0]["velocity_change"] == 0.0
    assert lines(tmp_path / "two")[0]["velocity_change"] > 0.0


def test_the_lora_serves_as_it_was_trained(training, tmp_path):
    trainer = training(tmp_path, iterations=1)
    (file,) = trainer.run()
    fresh = template_pipeline()
    plain = latents(fresh)
    fresh.loras.load("trained", file)
    assert torch.equal(latents(fresh), latents(trainer.pipeline))
    assert not torch.equal(latents(fresh), plain)


def latents(pipeline):
    chunks = pipeline.rollout("a red circle", seed=5, num_chunk=2)
    return torch.cat([chunk.latent for chunk in chunks], dim=2)


@pytest.mark.parametrize("algorithm", ["grpo", "nft"])
def test_all_weights_of_a_small_model_learn_to_be_bright(training, tmp_path, algorithm):
    """The mean of the last three of twelve iterations against that of the first three, on 24 samples each."""
    trainer = training(
        tmp_path, algorithm, method="full", iterations=12, lr=2e-2, group_size=4, batch=8,
        sigmas=(1.0, 0.7), num_chunk=2, first_chunk=0,
    )  # fmt: skip
    trainer.run()
    rewards = [line["reward"] for line in lines(tmp_path)]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.05
    assert (tmp_path / "weights.safetensors").exists()


def test_a_group_begins_alike_and_then_differs_whatever_the_batch(training, tmp_path):
    trainer = training(tmp_path)
    pipeline, plan = trainer.pipeline, trainer.objective.plan
    options = {"group_size": 2, "num_chunk": 2, "first_chunk": 1, "seed": 4}
    prompts = ["a red circle", "a blue ring"]
    (whole,) = sample_groups(pipeline, plan, prompts, batch=4, **options)
    start, after = (chunk.clean["video"] for chunk in whole.segment.chunks)
    assert torch.equal(start[0], start[1]) and torch.equal(start[2], start[3])
    assert not torch.equal(start[0], start[2])
    assert not torch.equal(after[0], after[1]) and not torch.equal(after[2], after[3])
    assert whole.prompts == ["a red circle", "a red circle", "a blue ring", "a blue ring"]
    assert len(whole.frames) == 4 and whole.frames.dtype == torch.uint8
    parts = sample_groups(pipeline, plan, prompts, batch=3, **options)
    assert [len(part.prompts) for part in parts] == [2, 2]
    joined = torch.cat([part.segment.chunks[1].clean["video"] for part in parts])
    torch.testing.assert_close(joined, after, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("algorithm", ["grpo", "nft"])
def test_several_batches_make_the_gradient_of_one(training, tmp_path, algorithm):
    """Equal up to the order of sums."""
    advantages, gradients = torch.tensor([1.0, -1.0, 0.5, -0.5]), []
    for batch in (4, 2):
        trainer = training(tmp_path / str(batch), algorithm, max_grad_norm=1e9)
        batches = sample_groups(
            trainer.pipeline, trainer.objective.plan, ["a red circle", "a blue ring"], group_size=2, batch=batch,
            num_chunk=2, first_chunk=1, seed=4,
        )  # fmt: skip
        trainer.optimizer.step = lambda: None
        trainer._update(batches, advantages, 0)
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in trainer.weights.parameters]))
    assert gradients[0].any()
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-5 * float(gradients[0].abs().max()))


def test_what_does_not_fit_is_refused_with_what_to_do(training, tmp_path):
    training(tmp_path, iterations=1).run()
    with pytest.raises(UserError, match="holds a training already; give --resume"):
        training(tmp_path)
    with pytest.raises(UserError, match=r"trained with other settings: lr \(0.003, now 0.1\)"):
        training(tmp_path, resume=True, lr=0.1)
    with pytest.raises(UserError, match="holds no training to go on with"):
        training(tmp_path / "empty", resume=True)
    assert training(tmp_path, resume=True, iterations=5).iteration == 1
    trainer = training(tmp_path / "grpo", "grpo", steps=(1,))
    with pytest.raises(ValueError, match=r"steps \(1,\) draw no noise here"):
        trainer.step()


def test_prompts_come_from_a_file_in_turn(training, tmp_path):
    (tmp_path / "prompts.txt").write_text("a red circle\n\n a blue ring \na green cross\n")
    trainer = training(tmp_path / "out", prompts=tmp_path / "prompts.txt")
    assert trainer._prompts(2, 0) == ["a red circle", "a blue ring"]
    trainer.iteration = 1
    assert trainer._prompts(2, 0) == ["a green cross", "a red circle"]


def test_a_gradient_that_is_not_finite_ends_the_training(training, tmp_path):
    trainer = training(tmp_path)
    weight = next(iter(trainer.weights.loras[0].weights.values()))
    trainer.objective.losses = lambda *_: iter([Loss((weight * float("inf")).sum(), {})])
    with pytest.raises(UserError, match="the gradient is not finite in iteration 1; a lower --lr may help"):
        trainer.step()
    assert all(bool(parameter.isfinite().all()) for parameter in trainer.weights.parameters)
