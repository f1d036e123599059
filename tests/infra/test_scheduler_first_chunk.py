"""A chunk without context may take other steps than those that follow it."""

from __future__ import annotations

import pytest
import torch

from flashdreams.config import ConfigError, derive_config
from flashdreams.infra.scheduler import FewStepSchedulerConfig, FlowMatchEulerSchedulerConfig
from flashdreams.recipes.template.config import PIPELINE_TEMPLATE

pytestmark = pytest.mark.ci_cpu

LONG = (1000, 750, 500, 250)


def few_step(steps, first=LONG):
    return FewStepSchedulerConfig(num_steps=len(steps), denoising_steps=steps, first_chunk_steps=first)


def told(steps):
    return [round(step.timestep, 1) for step in steps]


def asked(monkeypatch, scheduler, run):
    """Timesteps that the network is asked for by ``run(pipeline)``, in order."""
    pipeline = derive_config(PIPELINE_TEMPLATE, diffusion_model={"scheduler": scheduler}).setup()
    model, timesteps = pipeline.diffusion_model.transformer, []
    predict = model.predict_flow
    monkeypatch.setattr(model, "predict_flow", lambda *a: timesteps.append(round(a[1].item(), 1)) or predict(*a))
    run(pipeline)
    return timesteps


def test_first_chunk_has_the_long_list_and_later_ones_the_short():
    scheduler = few_step((1000, 500)).setup()
    assert told(scheduler.steps_of(first=True)) == [1000.0, 937.5, 833.3, 625.0]
    assert told(scheduler.steps_of(first=False)) == told(scheduler.steps) == [1000.0, 833.3]
    assert FewStepSchedulerConfig().setup().steps_of(first=True) == FewStepSchedulerConfig().setup().steps
    euler = FlowMatchEulerSchedulerConfig().setup()
    assert euler.steps_of(first=True) is euler.steps


def test_a_single_step_draws_no_noise_at_all():
    scheduler = few_step((1000,)).setup()
    x, flow = torch.randn(5), torch.randn(5)
    out = scheduler.sample(x, lambda x, step: flow, lambda step: pytest.fail("one step is not re-noised"))
    torch.testing.assert_close(out, x - flow)


def test_the_chunk_loop_asks_for_them(monkeypatch):
    timesteps = asked(monkeypatch, few_step((1000, 500)), lambda p: list(p.rollout("a", num_chunk=3)))
    assert timesteps == [1000.0, 937.5, 833.3, 625.0] + 2 * [1000.0, 833.3]


def test_a_given_first_frame_is_context(monkeypatch):
    given = torch.zeros(1, 3, 1, 4, 6)
    run = lambda p: list(p.rollout("a", num_chunk=3, initial_latents=given))  # noqa: E731
    assert asked(monkeypatch, few_step((1000,)), run) == [1000.0, 1000.0]


def test_after_a_cut_there_is_no_context_again(monkeypatch):
    def run(pipeline):
        rollout = pipeline.rollout("a")
        next(rollout), next(rollout)
        rollout.set_prompt("b", policy="reset")
        next(rollout), next(rollout)

    timesteps = asked(monkeypatch, few_step((1000, 500)), run)
    assert timesteps == 2 * [1000.0, 937.5, 833.3, 625.0, 1000.0, 833.3]


@pytest.mark.parametrize("steps", [(), (250, 500), (1000, 0), (1001,)])
def test_lists_that_do_not_fall_are_refused(steps):
    with pytest.raises(ConfigError, match="first_chunk_steps are"):
        few_step((1000,), steps).setup()
