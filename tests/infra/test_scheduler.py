"""Samplers against closed forms, for every step count and shift of case B07."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from flashdreams.config import ConfigError
from flashdreams.infra.scheduler import FewStepSchedulerConfig, FlowMatchEulerSchedulerConfig, kernels

pytestmark = pytest.mark.ci_cpu

STEPS = (1, 2, 3, 4, 50, 51, 100, 999, 1000)
SHIFTS = (1e-3, 0.5, 1.0, 3.0, 5.0, 8.0, 12.0, 100.0)


def few_step(count, shift):
    steps = tuple(round(1000 - 1000 * i / count) for i in range(count))
    return FewStepSchedulerConfig(num_steps=count, denoising_steps=steps, shift=shift)


SOLVERS = {
    "euler": lambda n, s: FlowMatchEulerSchedulerConfig(num_steps=n, shift=s),
    "euler, diffusers' table": lambda n, s: FlowMatchEulerSchedulerConfig(num_steps=n, shift=s, table="diffusers"),
    "few-step": few_step,
}


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


@pytest.mark.parametrize("eta", [0.0, 0.3, 1.0])
def test_kernel_at_the_ends_of_the_table(eta):
    clean, noise = torch.randn(5), torch.randn(5)
    flow = noise - clean
    at_one = kernels.transition(noise, flow, 1.0, 0.5, eta, lambda: noise)
    assert at_one.isfinite().all()
    at_zero = kernels.transition(noise, flow, 1.0, 0.0, eta, lambda: pytest.fail("no noise is due at sigma 0"))
    torch.testing.assert_close(at_zero, clean, rtol=1e-6, atol=1e-6)
    stay = kernels.transition(clean, flow, 0.0, 0.0, eta, lambda: pytest.fail("no noise is due at sigma 0"))
    torch.testing.assert_close(stay, clean, rtol=1e-6, atol=1e-6)


def test_kernel_matches_its_moments():
    """Against the definition, in float64: mean (1-s')x0 + sqrt(s'^2 - std^2) eps, std = s' sin(eta pi/2)."""
    x0, eps = torch.randn(7, dtype=torch.float64), torch.randn(7, dtype=torch.float64)
    s, t, eta = 0.8, 0.45, 0.6
    x, z = (1 - s) * x0 + s * eps, torch.randn(7, dtype=torch.float64)
    std = t * math.sin(eta * math.pi / 2)
    want = (1 - t) * x0 + math.sqrt(t**2 - std**2) * eps + std * z
    torch.testing.assert_close(kernels.transition(x, eps - x0, s, t, eta, lambda: z), want, rtol=1e-12, atol=1e-12)


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
        (FewStepSchedulerConfig(num_steps=3), "distilled for 4 steps"),
        (FewStepSchedulerConfig(denoising_steps=(250, 500, 750, 1000)), "falling"),
    ],
)
def test_what_a_table_cannot_carry_is_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        config.setup()
