"""Several experts by noise level: which one predicts, and where their weights are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

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


def test_a_clip_asks_for_each_expert_in_turn_and_commits_without_them(monkeypatch):
    """So that weights move once on the way from high to low noise, and not at all for a commit that has no context."""
    low = derive_config(
        PIPELINE_TEMPLATE.diffusion_model.transformer, window_size_t=None, sink_size_t=0, first_len_t=None
    )
    config = derive_config(
        PIPELINE_TEMPLATE,
        diffusion_model=derive_config(
            PIPELINE_TEMPLATE.diffusion_model,
            transformer=low,
            high_noise=(ExpertConfig(sigma_low=0.9, transformer=low),),
            scheduler={"num_steps": 5},
            swap_experts=True,
        ),
    )
    pipeline, asked = config.setup(), []
    expert = pipeline.diffusion_model.expert
    monkeypatch.setattr(pipeline.diffusion_model, "expert", lambda index: asked.append(index) or expert(index))
    rollout = pipeline.rollout("a", num_frames=9)
    assert asked == [1, 0], "for the text's keys; the expert of the first steps comes last and is in place"
    asked.clear()
    next(rollout)
    high = sum(step.sigma >= 0.9 for step in pipeline.diffusion_model.scheduler.steps)
    assert 0 < high < 5 and asked == [0] * high + [1] * (5 - high)
    asked.clear()
    rollout.flush()
    assert asked == []


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
