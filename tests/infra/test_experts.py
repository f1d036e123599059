"""Several experts by noise level: which one predicts, and where their weights are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from flashdreams.config import derive_config
from flashdreams.infra.config import ExpertConfig
from flashdreams.infra.diffusion_model import DiffusionModel
from flashdreams.infra.load import load_pipeline
from flashdreams.recipes.template.config import PIPELINE_TEMPLATE

pytestmark = pytest.mark.ci_cpu

SIGMAS = 1.0, 0.9375, 0.8333, 0.625
"""Of a model of four steps."""


def two_experts(boundary: float, **options: object) -> DiffusionModel:
    low = PIPELINE_TEMPLATE.diffusion_model.transformer
    return derive_config(
        PIPELINE_TEMPLATE.diffusion_model, high_noise=(ExpertConfig(sigma_low=boundary, transformer=low),), **options
    ).setup()


class Movable(nn.Module):
    """Notes where it is sent, without going there: there may be one device only."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1))
        self.visits: list[str] = []

    def to(self, device: object) -> Movable:
        self.weight = nn.Parameter(torch.empty(1, device="meta" if str(device) == "meta" else "cpu"))
        self.visits.append(str(device))
        return self


@pytest.mark.parametrize(("boundary", "highs"), [(0.99, 1), (0.9, 2), (0.7, 3), (0.1, 4)])
def test_each_noise_level_goes_to_its_expert(boundary, highs):
    model = two_experts(boundary)
    assert [model.expert_index(sigma) for sigma in SIGMAS] == [0] * highs + [1] * (4 - highs)


def test_only_the_expert_in_use_is_on_the_device():
    model = two_experts(0.9, swap_experts=True)
    model.experts = nn.ModuleList([Movable(), Movable()])
    model.device = torch.device("meta")
    high, low = model.experts
    for index in (0, 0, 1, 1):
        model.expert(index)
    assert high.visits == ["cpu", "meta", "cpu"]
    assert low.visits == ["cpu", "cpu", "meta"]


def test_experts_that_stay_are_never_moved():
    model = two_experts(0.9)
    model.experts = nn.ModuleList([Movable(), Movable()])
    model.device = torch.device("meta")
    assert model.expert(0) is model.experts[0]
    assert not model.experts[0].visits


def test_swapping_changes_no_number():
    rollouts = []
    for swap in (False, True):
        torch.manual_seed(0)
        config = derive_config(
            PIPELINE_TEMPLATE,
            diffusion_model=derive_config(
                PIPELINE_TEMPLATE.diffusion_model,
                high_noise=(ExpertConfig(sigma_low=0.9, transformer=PIPELINE_TEMPLATE.diffusion_model.transformer),),
                swap_experts=swap,
            ),
        )
        rollouts.append(config.setup().rollout("a", num_chunk=2))
    first, second = ([chunk.latent for chunk in rollout] for rollout in rollouts)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert isinstance(first[0], Tensor)


def test_a_number_format_is_that_of_every_expert():
    config = derive_config(
        PIPELINE_TEMPLATE,
        diffusion_model={
            "high_noise": (ExpertConfig(sigma_low=0.9, transformer=PIPELINE_TEMPLATE.diffusion_model.transformer),)
        },
    )
    pipeline = load_pipeline(config, device="cpu", dtype="bfloat16")
    dtypes = {parameter.dtype for parameter in pipeline.diffusion_model.experts.parameters()}
    assert dtypes == {torch.bfloat16}
