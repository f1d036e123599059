"""UniPC, DPM++(2M) and Euler against diffusers' schedulers: tables in float32, steps in float64.

The tables are float32 on both sides: of UniPC to the bit, of Euler to a unit in the last place. The steps are the same
maths; diffusers takes its coefficients from the float32 table in float32, and casts the sample of Euler's step to
float32: it steps in :class:`float64.Float64`, from the same table in float64. Wan's own tables differ from those of
diffusers by construction (goldens ``sched_native_*``): for them diffusers' kernel is given our table.
"""

from __future__ import annotations

import pytest
import torch
from diffusers import DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from torch import Tensor

from flashdreams.infra.scheduler import (
    DPMPPSchedulerConfig,
    FlowMatchEulerSchedulerConfig,
    UniPCSchedulerConfig,
)
from flashdreams.infra.scheduler.samplers import Scheduler
from float64 import Float64, assert_same, randn

pytestmark = [
    pytest.mark.ci_cpu,
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # within diffusers
]

STEPS, SHIFTS = (2, 3, 4, 10, 20, 50), (1.0, 3.0, 5.0, 8.0)
FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}


def flow(x: Tensor, timestep: float) -> Tensor:
    """A closed-form model, not linear in the sample."""
    return 0.5 * x - 0.4 * torch.tanh(1.5 * x) + timestep / 1000 * 0.3


def our_samples(ours: Scheduler) -> Tensor:
    """The noise and the sample after each step, stacked."""
    samples, state = [randn(1, 4, 2, 3, 5)], ours.begin()
    for step in ours.steps:
        x = samples[-1]
        samples.append(ours.transition(x, flow(x, step.timestep), step, lambda: torch.empty(0), state))
    return torch.stack(samples)


def their_samples(theirs) -> Tensor:
    samples = [randn(1, 4, 2, 3, 5)]
    theirs.sigmas = theirs.sigmas.double()
    with Float64():
        for t in theirs.timesteps:
            x = samples[-1]
            samples.append(theirs.step(flow(x, float(t)), t, x, return_dict=False)[0])
    return torch.stack(samples)


def give_table(theirs, ours: Scheduler, steps: int) -> None:
    theirs.set_timesteps(steps)
    theirs.sigmas, theirs.timesteps = ours.sigmas(steps), ours.timesteps(steps).to(theirs.timesteps.dtype)
    theirs.set_begin_index(0)


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("steps", STEPS)
def test_unipc(steps: int, shift: float):
    ours = UniPCSchedulerConfig(num_steps=steps, shift=shift, table="diffusers").setup()
    theirs = UniPCMultistepScheduler(flow_shift=shift, **FLOW)
    theirs.set_timesteps(steps)
    assert torch.equal(ours.sigmas(steps), theirs.sigmas)
    assert torch.equal(ours.timesteps(steps).long(), theirs.timesteps)
    assert_same("UniPC, the table of diffusers", our_samples(ours), their_samples(theirs))


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("steps", STEPS)
def test_unipc_on_the_table_of_the_original(steps: int, shift: float):
    ours = UniPCSchedulerConfig(num_steps=steps, shift=shift).setup()
    theirs = UniPCMultistepScheduler(**FLOW)
    give_table(theirs, ours, steps)
    assert_same("UniPC, Wan's table", our_samples(ours), their_samples(theirs))


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("steps", STEPS)
def test_dpmpp_on_the_table_of_the_original(steps: int, shift: float):
    ours = DPMPPSchedulerConfig(num_steps=steps, shift=shift).setup()
    theirs = DPMSolverMultistepScheduler(**FLOW)
    give_table(theirs, ours, steps)
    assert_same("DPM++(2M), Wan's table", our_samples(ours), their_samples(theirs))


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("steps", STEPS)
def test_euler(steps: int, shift: float):
    ours = FlowMatchEulerSchedulerConfig(num_steps=steps, shift=shift, table="diffusers").setup()
    theirs = FlowMatchEulerDiscreteScheduler(shift=shift)
    theirs.set_timesteps(steps)
    assert torch.equal(ours.sigmas(steps), theirs.sigmas)
    assert torch.equal(ours.timesteps(steps), theirs.timesteps)
    give_table(theirs, ours, steps)
    assert_same("Euler, the table of diffusers", our_samples(ours), their_samples(theirs))


def test_one_step_without_its_correction_is_noticed():
    ours = UniPCSchedulerConfig(num_steps=10, shift=5.0, table="diffusers").setup()
    theirs = UniPCMultistepScheduler(flow_shift=5.0, disable_corrector=[3], **FLOW)
    theirs.set_timesteps(10)
    assert (our_samples(ours) - their_samples(theirs)).abs().max() > 1e-5
