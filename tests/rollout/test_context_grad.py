"""The gradient through the context is the gradient: finite differences in float64."""

from __future__ import annotations

import pytest
import torch

from flashdreams.rollout import Kernel, plan_for, replay, rollout
from template_model import template_pipeline

pytestmark = pytest.mark.ci_cpu


@pytest.fixture(scope="module")
def trained():
    """A pipeline in float64, a segment with a changed prompt and an eviction, and a direction in weight space."""
    pipeline = template_pipeline(dtype="float64", rope="cache_relative", window_size_t=5, context_noise=0.05)
    plan = plan_for(pipeline, sde=Kernel("flow_sde", eta=0.7), storage_dtype="float64")

    def switch(run, index):
        if index == 2:
            run.set_prompt("a blue star", policy="recache")

    with torch.no_grad():
        segment = rollout(pipeline, ["a red circle"], plan, num_chunk=5, seed=3, control=[[0.4] * 30], before=switch)
    network = pipeline.diffusion_model.transformer.network.requires_grad_(True)
    generator = torch.Generator().manual_seed(1)
    direction = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in network.parameters()]
    return pipeline, segment, network, direction


def score(pipeline, segment, **options):
    return replay(pipeline, segment, [(2, 0), (4, 0), (4, 1)], **options).log_probs.sum()


def slope(trained, **options):
    """Derivative of the score along the direction, by backward."""
    pipeline, segment, network, direction = trained
    network.zero_grad()
    score(pipeline, segment, **options).backward()
    return sum((p.grad * d).sum().item() for p, d in zip(network.parameters(), direction, strict=True))


def test_the_full_gradient_is_the_finite_difference_and_the_detached_one_is_not(trained):
    pipeline, segment, network, direction = trained
    epsilon, ends = 1e-6, []
    with torch.no_grad():
        for sign in (1, -2, 1):  # one way, the other, and back
            for parameter, d in zip(network.parameters(), direction, strict=True):
                parameter.add_(d, alpha=sign * epsilon)
            ends.append(score(pipeline, segment).item())
    difference = (ends[0] - ends[1]) / (2 * epsilon)
    assert abs(slope(trained, context_grad="full") - difference) < 1e-5 * abs(difference)
    assert abs(slope(trained, context_grad="detached") - difference) > 1e-3 * abs(difference)
