"""A plan is made of a pipeline, pinned, and refused where it is not what runs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from flashdreams.config import ConfigError
from flashdreams.infra.scheduler import (
    BoundaryFewStepSchedulerConfig,
    FewStepSchedulerConfig,
    UniPCSchedulerConfig,
)
from flashdreams.recipes.template.config import PIPELINE_TEMPLATE
from flashdreams.rollout import Kernel, Plan, PlanError, check_sigmas, plan_for
from template_model import template_pipeline

pytestmark = pytest.mark.ci_cpu

SDE = Kernel("flow_sde", eta=0.7)


def scheduled(scheduler):
    """The template with another sampler."""
    model = replace(PIPELINE_TEMPLATE.diffusion_model, scheduler=scheduler)
    return replace(PIPELINE_TEMPLATE, diffusion_model=model).setup()


def kernels(plan, chunk, *, first=False):
    return [step.kernel.name for step in plan.steps_of(chunk, first=first)]


def test_the_plan_of_serving_is_the_schedulers_own_steps(pipeline):
    plan = plan_for(pipeline)
    assert plan.steps == pipeline.diffusion_model.scheduler.steps
    assert (plan.window_size_t, plan.sink_size_t, plan.len_t, plan.first_len_t) == (7, 1, 2, 1)


def test_a_few_step_sampler_is_stochastic_at_every_step_but_the_last():
    plan = plan_for(scheduled(FewStepSchedulerConfig()))
    stds = [step.kernel.std(step.sigma, step.sigma_next) for step in plan.steps_of(3, first=False)]
    assert stds == [step.sigma_next for step in plan.steps]
    assert kernels(plan, 0) == ["cps"] * 4


def test_a_chunk_without_context_has_the_steps_that_the_model_takes_there():
    plan = plan_for(scheduled(FewStepSchedulerConfig(first_chunk_steps=(1000, 900, 800, 600, 400, 200))))
    assert len(plan.steps_of(0, first=True)) == 6
    assert len(plan.steps_of(1, first=False)) == 4


def test_experts_that_meet_at_a_boundary_have_kernels_of_their_own():
    pipeline = scheduled(BoundaryFewStepSchedulerConfig())
    assert set(kernels(plan_for(pipeline), 0)) == {"boundary", "cps"}
    with pytest.raises(ConfigError, match="leave sigmas out"):
        plan_for(pipeline, sigmas=[1.0, 0.5, 0.0])


def test_solvers_are_kernels_too_and_give_way_at_stochastic_steps():
    plan = plan_for(scheduled(UniPCSchedulerConfig(num_steps=4)), sde=SDE, stochastic=[1])
    assert kernels(plan, 0) == ["unipc", "flow_sde", "unipc", "unipc"]


def test_stochastic_steps_may_differ_between_chunks(pipeline):
    plan = plan_for(pipeline, sde=SDE, stochastic=[[0], [], [1]])
    names = [kernels(plan, chunk) for chunk in range(5)]
    assert names == [["flow_sde", "ode"], ["ode", "ode"], *[["ode", "flow_sde"]] * 3]


def test_json_gives_back_the_same_plan_and_digest(pipeline):
    plan = plan_for(pipeline, sde=SDE, stochastic=[[0], [1]], storage_dtype="bfloat16")
    again = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again == plan
    assert again.digest == plan.digest


@pytest.mark.parametrize(
    "change",
    [{"window_size_t": 9}, {"context_noise": 0.1}, {"storage_dtype": "float16"}, {"score": "surrogate"}, {"sde": None,
     "stochastic": ()}],
)  # fmt: skip
def test_whatever_changes_the_sampling_changes_the_digest(pipeline, change):
    plan = plan_for(pipeline, sde=SDE)
    assert replace(plan, **change).digest != plan.digest


def test_a_plan_without_sigmas_is_refused(pipeline):
    values = plan_for(pipeline).to_dict()
    with pytest.raises(ConfigError, match="no sigmas"):
        Plan.from_dict({**values, "steps": []})
    del values["steps"]
    with pytest.raises(ConfigError, match="no sigmas"):
        Plan.from_dict(values)


def test_a_drivers_sigmas_take_the_place_of_the_models(pipeline):
    plan = plan_for(pipeline, sigmas=[1.0, 0.8, 0.3, 0.0])
    assert [round(step.timestep, 4) for step in plan.steps] == [1000.0, 800.0, 300.0]
    for wrong in ([1.0, 0.5], [0.5, 0.5, 0.0], [1.2, 0.0], [0.0]):
        with pytest.raises(ConfigError, match="fall from at most 1 to a final 0"):
            plan_for(pipeline, sigmas=wrong)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"storage_dtype": "int8"}, "storage_dtype is 'int8'"),
        ({"stochastic": ((5,),)}, "stochastic step 5 is none of the 2 steps"),
        ({"sde": None}, "give both, or neither"),
    ],
)
def test_values_out_of_range_are_named(pipeline, values, message):
    with pytest.raises(ConfigError, match=message):
        replace(plan_for(pipeline, sde=SDE), **values)


def test_stochastic_steps_need_a_kernel(pipeline):
    with pytest.raises(ConfigError, match="need a kernel to draw with"):
        plan_for(pipeline, stochastic=[0])


def test_a_plan_for_another_setup_is_refused_with_what_differs(pipeline):
    plan = plan_for(template_pipeline(window_size_t=9, guidance_scale=2.0))
    with pytest.raises(PlanError, match=r"window_size_t \(9, here 7\), guidance_scale \(\(2.0,\), here \(1.0,\)\)"):
        plan.check(pipeline)


def test_unknown_fields_are_refused(pipeline):
    with pytest.raises(ConfigError, match="has no surprise"):
        Plan.from_dict({**plan_for(pipeline).to_dict(), "surprise": 1})


@pytest.mark.parametrize(
    ("ran", "message"),
    [((), "no sigmas came back"), ((1.0, 0.0), "2 sigmas were run"), ((1.0, 0.501, 0.0), "sigma 1 was 0.501")],
)
def test_the_echo_of_sigmas_is_compared(ran, message):
    check_sigmas((1.0, 0.5, 0.0), (1.0, 0.500001, 0.0))
    with pytest.raises(PlanError, match=message):
        check_sigmas((1.0, 0.5, 0.0), ran)
