"""One block-causal pass over clean chunks and noisy copies equals the chunks one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashdreams.infra.config import ExpertConfig
from flashdreams.infra.diffusion_model import VIDEO
from flashdreams.recipes.template.config import PIPELINE_TEMPLATE
from flashdreams.rollout import Kernel, plan_for, predict_noise_at_step, replay, rollout
from template_model import template_pipeline

pytestmark = pytest.mark.ci_cpu

SDE = Kernel("flow_sde", eta=0.7)
CONTROL = [[0.02 * i for i in range(40)], [-0.5] * 40]


def sampled(pipeline, **options):
    plan = plan_for(pipeline, sde=SDE)
    return rollout(pipeline, ["a red circle", "two squares"], plan, num_chunk=7, seed=3, control=CONTROL, **options)


@pytest.mark.parametrize(
    "options",
    [{}, {"guidance_scale": 2.5}, {"guidance_scale": 2.5, "cfg": "sequential"},
     {"sink_size_t": 0, "window_size_t": 3}, {"sink_size_t": 2, "window_size_t": 4, "context_noise": 0.1},
     {"sink_size_t": 0, "rope": "cache_relative"}],
    ids=str,
)  # fmt: skip
def test_log_probabilities_equal_those_of_exact_replay(options):
    """In float32 to 1e-5, with windows that moved on, sinks, guidance, controls and a ragged first chunk."""
    pipeline = template_pipeline(**options)
    segment = sampled(pipeline)
    packed = replay(pipeline, segment, mode="packed")
    assert (packed.log_probs - segment.log_probs()).abs().max() < 1e-5
    exact = replay(pipeline, segment)
    for one, other in zip(packed.velocities, exact.velocities, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("context_grad", ["detached", "full"])
def test_gradients_equal_those_of_exact_replay(fresh, context_grad):
    segment = sampled(fresh)
    network = fresh.diffusion_model.transformer.network
    fresh.diffusion_model.requires_grad_(True)
    found = []
    for mode in ("exact", "packed"):
        fresh.diffusion_model.zero_grad()
        replay(
            fresh, segment, [(0, 0), (3, 1), (6, 0)], mode=mode, context_grad=context_grad
        ).log_probs.sum().backward()
        found.append(torch.cat([parameter.grad.flatten() for parameter in network.parameters()]))
    assert (found[0] - found[1]).norm() < 1e-4 * found[0].norm()


def test_another_context_chunk_changes_what_follows_it_and_nothing_before(pipeline):
    segment = sampled(pipeline)
    before = replay(pipeline, segment, mode="packed").velocities
    segment.chunks[3].clean = {VIDEO: torch.randn_like(segment.chunks[3].clean[VIDEO])}
    after = replay(pipeline, segment, mode="packed").velocities
    changed = [not torch.allclose(one, other, rtol=1e-6, atol=1e-6) for one, other in zip(before, after, strict=True)]
    assert changed == [False] * 8 + [True] * 6


def test_noised_chunks_have_the_flow_of_exact_replay(pipeline):
    segment = sampled(pipeline)
    sigma = torch.rand(2, 7) * 0.9 + 0.05
    samples = [torch.randn_like(chunk.clean[VIDEO]) for chunk in segment.chunks]
    exact, packed = (
        predict_noise_at_step(pipeline, segment, samples, sigma, mode=mode) for mode in ("exact", "packed")
    )
    for one, other in zip(exact, packed, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_what_one_pass_cannot_equal_is_refused_with_the_reason():
    moved = template_pipeline(rope="cache_relative")
    with pytest.raises(ValueError, match="packed: this model has a sink that moves with the window"):
        replay(moved, sampled(moved), mode="packed")
    replay(moved, sampled(moved), [(2, 0)], mode="packed")  # it has not moved by then

    switched = template_pipeline()
    segment = sampled(switched, before=lambda run, i: run.set_prompt(["x", "y"]) if i == 4 else None)
    with pytest.raises(ValueError, match="packed: prompt changed before chunk 4"):
        replay(switched, segment, mode="packed")
    replay(switched, segment, [(3, 0)], mode="packed")  # nothing had changed by then

    stamped = template_pipeline(stamp_image_latent=True, first_len_t=2)
    with pytest.raises(ValueError, match="packed: this model has given frames"):
        replay(stamped, sampled(stamped), mode="packed")

    model = PIPELINE_TEMPLATE.diffusion_model
    experts = replace(model, high_noise=(ExpertConfig(sigma_low=0.9, transformer=model.transformer),))
    two = replace(PIPELINE_TEMPLATE, diffusion_model=experts).setup()
    segment = sampled(two)
    with pytest.raises(ValueError, match="packed: this model has several experts"):
        replay(two, segment, mode="packed")
    assert torch.equal(replay(two, segment).log_probs, segment.log_probs())
    with pytest.raises(ValueError, match="belong to several experts"):
        predict_noise_at_step(two, segment, [segment.chunks[0].state(0)], torch.tensor([0.95, 0.5]), chunks=[0])


def test_a_network_that_does_not_say_frame_by_frame_is_refused(pipeline, monkeypatch):
    segment = sampled(pipeline)
    monkeypatch.delattr(type(pipeline.diffusion_model.transformer.network), "frame_by_frame")
    with pytest.raises(ValueError, match="TemplateNetwork does not say frame_by_frame"):
        replay(pipeline, segment, mode="packed")
