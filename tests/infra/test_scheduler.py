"""Samplers against closed forms, for every step count and shift of case B07."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from flashdreams.config import ConfigError
from flashdreams.infra.scheduler import (
    DPMPPSchedulerConfig,
    FewStepSchedulerConfig,
    FlowMatchEulerSchedulerConfig,
    UniPCSchedulerConfig,
    kernels,
    multistep,
)

pytestmark = pytest.mark.ci_cpu

STEPS = (1, 2, 3, 4, 50, 51, 100, 999, 1000)
SHIFTS = (1e-3, 0.5, 1.0, 3.0, 5.0, 8.0, 12.0, 100.0)


def few_step(count, shift):
    steps = tuple(round(1000 - 1000 * i / count) for i in range(count))
    return FewStepSchedulerConfig(num_steps=count, denoising_steps=steps, shift=shift)


def no_noise(step):
    pytest.fail("a deterministic solver draws no noise")


SOLVERS = {
    "euler": lambda n, s: FlowMatchEulerSchedulerConfig(num_steps=n, shift=s),
    "euler, diffusers' table": lambda n, s: FlowMatchEulerSchedulerConfig(num_steps=n, shift=s, table="diffusers"),
    "few-step": few_step,
    "unipc": lambda n, s: UniPCSchedulerConfig(num_steps=n, shift=s),
    "unipc, diffusers' table": lambda n, s: UniPCSchedulerConfig(num_steps=n, shift=s, table="diffusers"),
    "dpm++": lambda n, s: DPMPPSchedulerConfig(num_steps=n, shift=s),
}
MULTISTEP = tuple(SOLVERS)[-3:]


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize(("steps", "shift"), list(itertools.product(STEPS, SHIFTS)))
def test_table_falls_to_zero_and_a_constant_field_is_exact(solver, steps, shift):
    scheduler = SOLVERS[solver](steps, shift).setup()
    table = scheduler.sigmas(steps)
    assert table.shape == (steps + 1,) and table.isfinite().all()
    assert table[0] <= 1 and table[-1] == 0 and (table.diff() < 0).all()
    clean, noise = torch.tensor([1.0]), torch.tensor([0.25])
    start = kernels.add_noise(clean, noise, table[0].item())
    end = scheduler.sample(start, lambda x, step: noise - clean, lambda step: torch.tensor([0.25]))
    assert abs(end.item() - 1) < 1e-4


@pytest.mark.parametrize("solver", MULTISTEP)
@pytest.mark.parametrize(("steps", "shift"), list(itertools.product((1, 2, 3, 51, 1000), (1e-3, 1.0, 100.0))))
def test_multistep_solvers_stay_finite_on_a_field_that_changes_and_are_told_whole_timesteps(solver, steps, shift):
    scheduler = SOLVERS[solver](steps, shift).setup()
    told = scheduler.timesteps(steps)
    assert told.equal(told.trunc()) and (1000 * scheduler.sigmas(steps)[:-1] - told).abs().max() <= 1
    end = scheduler.sample(torch.randn(8), lambda x, step: torch.tanh(3 * x) + step.sigma, no_noise)
    assert end.isfinite().all() and end.abs().max() < 100


@pytest.mark.parametrize("kernel", [multistep.unipc_step, multistep.dpmpp_step])
def test_multistep_kernels_start_from_sigma_one(kernel):
    """Log-SNR is -inf there: the first step is a plain re-mix, the second knows no slope, the rest are ordinary."""
    state, x = multistep.SolverState(), torch.randn(5, dtype=torch.float64)
    levels = (1.0, 0.9, 0.6, 0.2, 0.0)
    first = torch.randn(5, dtype=torch.float64)
    at_09 = kernel(x, first, 1.0, 0.9, state)
    torch.testing.assert_close(at_09, 0.9 * x + 0.1 * first, rtol=1e-12, atol=1e-12)
    x = at_09
    for sigma, sigma_next in itertools.pairwise(levels[1:]):
        clean = torch.randn(5, dtype=torch.float64)
        x = kernel(x, clean, sigma, sigma_next, state)
        assert x.isfinite().all()
    assert torch.equal(x, clean), "the last step, to 0, is of first order"


@pytest.mark.parametrize(("solver", "order"), list(zip(MULTISTEP, (3, 3, 2))))
def test_multistep_solvers_reach_their_order(solver, order):
    """Halving the steps of ``x' = flow(x, sigma)`` divides the error by 2**order or more; a corrector adds to it."""

    def error(steps):
        scheduler = SOLVERS[solver](steps, 1.0).setup()
        x, state, last = torch.ones(1, dtype=torch.float64), scheduler.begin(), scheduler.steps[steps * 3 // 4]
        for step in scheduler.steps[: last.index]:
            x = scheduler.transition(x, math.cos(3 * step.sigma) * x, step, lambda: no_noise(step), state)
        exact = math.exp((math.sin(3 * last.sigma) - math.sin(3 * scheduler.steps[0].sigma)) / 3)
        return abs(x.item() - exact)

    assert math.log2(error(40) / error(80)) > order - 0.5


@pytest.mark.parametrize("solver", MULTISTEP)
def test_the_history_of_one_chunk_is_no_concern_of_another(solver):
    scheduler = SOLVERS[solver](6, 5.0).setup()
    field = lambda x, step: torch.tanh(x) * step.sigma  # noqa: E731
    starts = [torch.randn(4), torch.randn(4)]
    alone = [scheduler.sample(x, field, no_noise) for x in starts]
    together, states = list(starts), [scheduler.begin() for _ in starts]
    for step in scheduler.steps:
        for i, x in enumerate(together):
            together[i] = scheduler.transition(x, field(x, step), step, lambda: no_noise(step), states[i])
    assert all(torch.equal(a, b) for a, b in zip(alone, together))


@pytest.mark.parametrize("solver", MULTISTEP)
def test_a_multistep_transition_without_its_history_is_refused(solver):
    scheduler = SOLVERS[solver](4, 5.0).setup()
    with pytest.raises(ValueError, match="give it the state of begin"):
        scheduler.transition(torch.zeros(1), torch.zeros(1), scheduler.steps[0], lambda: pytest.fail("no noise"))


def test_warped_steps_of_self_forcing():
    scheduler = FewStepSchedulerConfig(shift=5.0).setup()
    assert [round(step.timestep, 3) for step in scheduler.steps] == [1000.0, 937.5, 833.333, 625.0]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (FlowMatchEulerSchedulerConfig(num_steps=0), "num_steps is 0"),
        (FlowMatchEulerSchedulerConfig(num_steps=1001), "num_steps is 1001"),
        (FlowMatchEulerSchedulerConfig(shift=-1.0), "shift is -1.0"),
        (FlowMatchEulerSchedulerConfig(shift=math.nan), "shift is nan"),
        (UniPCSchedulerConfig(shift=0.0), "shift is 0.0"),
        (UniPCSchedulerConfig(num_steps=1000, shift=1e6), "1000 steps cannot be told apart in float32"),
        (DPMPPSchedulerConfig(shift=math.inf), "shift is inf"),
        (DPMPPSchedulerConfig(num_steps=1000, shift=1e6), "1000 steps cannot be told apart in float32"),
        (FewStepSchedulerConfig(num_steps=3), "distilled for 4 steps"),
        (FewStepSchedulerConfig(denoising_steps=(250, 500, 750, 1000)), "falling"),
    ],
)
def test_what_a_table_cannot_carry_is_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        config.setup()
