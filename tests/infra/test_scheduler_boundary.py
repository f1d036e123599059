"""The two-expert few-step sampler against the published procedure, written out, and against its definition."""

from __future__ import annotations

import math

import pytest
import torch

from flashdreams.config import ConfigError
from flashdreams.infra.scheduler import BoundaryFewStepSchedulerConfig, kernels
from flashdreams.infra.scheduler.kernels import Kernel

pytestmark = pytest.mark.ci_cpu

STEPS = (1000, 850, 700, 550, 350, 275, 200, 125)


def published(noise, flow, draws, shift=12.0, boundary=0.875, steps=STEPS):
    """FastVideo's loop, step by step in plain numbers: no code of ours."""
    table = [shift * u / (1 + (shift - 1) * u) for u in ((1000 - i) / 1000 for i in range(1000))]
    warped = [1000 * table[1000 - step] for step in steps]
    level = lambda t: min(table, key=lambda sigma: abs(1000 * sigma - t))  # noqa: E731
    sigma_b = level(1000 * boundary)
    high = [t for t in warped if t >= 1000 * boundary]
    x, count = noise, 0
    for t, following in zip(high, [*high[1:], None]):
        sigma = level(t)
        x_b = x - (sigma - sigma_b) * flow(x, t)
        x = x_b
        if following is not None:
            s = level(following)
            alpha = (1 - s) / (1 - sigma_b)
            beta = math.sqrt(s**2 - (alpha * sigma_b) ** 2)
            x = alpha * x_b + beta * draws[count]
        count += 1
    low = [t for t in warped if t < 1000 * boundary]
    for t, following in zip(low, [*low[1:], None]):
        clean = x - level(t) * flow(x, t)
        x = clean
        if following is not None:
            x = (1 - level(following)) * clean + level(following) * draws[count]
        count += 1
    return x


@pytest.mark.parametrize("shift", [12.0, 5.0])
def test_sampler_equals_the_published_loop(shift):
    generator = torch.Generator().manual_seed(0)
    noise, *draws = (torch.randn(3, 5, generator=generator, dtype=torch.float64) for _ in range(9))
    flow = lambda x, t: torch.tanh(2 * x) + t / 700  # noqa: E731
    scheduler = BoundaryFewStepSchedulerConfig(shift=shift).setup()
    ours = scheduler.sample(noise, lambda x, step: flow(x, step.timestep), lambda step: draws[step.index])
    # Our tables are float32, as the published ones are; the reference's are float64.
    torch.testing.assert_close(ours, published(noise, flow, draws, shift), rtol=2e-6, atol=2e-6)


def test_table_at_shift_12_has_four_steps_for_each_expert():
    scheduler = BoundaryFewStepSchedulerConfig().setup()
    told = [round(step.timestep, 2) for step in scheduler.steps]
    assert told == [1000.0, 985.51, 965.52, 936.17, 865.98, 819.88, 750.0, 631.58]
    assert sum(step.sigma >= 0.875 for step in scheduler.steps) == 4
    assert abs(scheduler.boundary - 0.875) < 1e-3


def test_the_last_step_above_hands_the_boundary_state_on_and_draws_nothing():
    scheduler = BoundaryFewStepSchedulerConfig().setup()
    last = scheduler.steps[3]
    assert last.sigma > 0.875 > last.sigma_next
    clean, noise = torch.randn(6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    x = kernels.add_noise(clean, noise, last.sigma)
    handed = scheduler.transition(x, noise - clean, last, lambda: pytest.fail("no noise is due at the boundary"))
    want = kernels.add_noise(clean, noise, scheduler.boundary)
    torch.testing.assert_close(handed, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sigma_next", [0.88, 0.936, 0.985, 1.0])
def test_renoise_from_the_boundary_is_the_gaussian_of_the_higher_level(sigma_next):
    """If the state at the boundary is (1 - b) x0 + b eps, what comes out is (1 - s) x0 + s times a unit Gaussian."""
    b, sigma, clean = 0.875, 0.99, 0.7
    eps = torch.randn(400_000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    fresh = torch.randn(400_000, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    x = (1 - sigma) * clean + sigma * eps
    kernel = Kernel("boundary", boundary=b)
    out = kernel.mean(x, eps - clean, sigma, sigma_next) + kernel.std(sigma, sigma_next) * fresh
    assert abs(out.mean().item() - (1 - sigma_next) * clean) < 5e-3
    assert abs(out.std().item() - sigma_next) < 5e-3
    kept = b * (1 - sigma_next) / (1 - b)
    assert math.isclose(kept**2 + kernel.std(sigma, sigma_next) ** 2, sigma_next**2, rel_tol=1e-12)


def test_estimate_at_the_boundary_is_made_in_float64():
    """In float32 the difference of two near levels times a large flow would lose half its digits."""
    x, flow = torch.full((4,), 1.0), torch.full((4,), 1e4)
    exact = x.double() - (0.9 - 0.875) * flow.double()
    assert torch.equal(Kernel("boundary", boundary=0.875).mean(x, flow, 0.9, 0.875), exact.float())


def test_a_table_that_never_leaves_the_boundary_is_refused():
    with pytest.raises(ConfigError, match="give a lower last step"):
        BoundaryFewStepSchedulerConfig(num_steps=2, denoising_steps=(1000, 900)).setup()
    with pytest.raises(ConfigError, match="boundary is 1"):
        BoundaryFewStepSchedulerConfig(boundary=1.0).setup()
