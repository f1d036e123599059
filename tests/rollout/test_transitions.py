"""Transition kernels against their published formulas, written out slowly, in float64."""

from __future__ import annotations

import json
import math
from operator import attrgetter

import pytest
import torch
from torch import Tensor

from flashdreams.config import ConfigError
from flashdreams.infra.scheduler import DPMPPSchedulerConfig, FewStepSchedulerConfig, UniPCSchedulerConfig
from flashdreams.infra.scheduler.kernels import EULER, RENOISE, Kernel, clean_estimate
from flashdreams.infra.scheduler.multistep import SolverState
from flashdreams.infra.scheduler.transitions import transition

pytestmark = pytest.mark.ci_cpu

STOCHASTIC = (
    Kernel("flow_sde", eta=0.7),
    Kernel("dance_sde", eta=0.3),
    Kernel("flash_sde", eta=0.6, sigma_max=0.96),
    Kernel("cps", eta=0.8),
    RENOISE,
    Kernel("boundary", boundary=0.3),
)
LEVELS = ((1.0, 0.9375), (0.8, 0.45), (0.6, 0.5))
SHAPE = (3, 4, 2, 3, 3)
NAME = attrgetter("name")


def draw(count: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(SHAPE, generator=generator, dtype=dtype) for _ in range(count)]


def published(kernel: Kernel, x: Tensor, v: Tensor, s: float, t: float) -> tuple[Tensor, float]:
    """Mean and standard deviation as the papers have them."""
    clean, noise, dt = x - s * v, x + (1 - s) * v, t - s
    if kernel.name == "cps":
        std = t * math.sin(kernel.eta * math.pi / 2)
        return (1 - t) * clean + math.sqrt(t * t - std * std) * noise, std
    if kernel.name == "boundary":
        b = kernel.boundary
        at_boundary, kept = (1 - b) * clean + b * noise, b * (1 - t) / (1 - b)
        return at_boundary * (1 - t) / (1 - b), math.sqrt(t * t - kept * kept)
    scale = {
        "flow_sde": kernel.eta * math.sqrt(s / (1 - (kernel.sigma_cap if s == 1 else s))),
        "dance_sde": kernel.eta,
        "flash_sde": kernel.eta * (kernel.sigma_min + (kernel.sigma_max - kernel.sigma_min) * s),
    }[kernel.name]
    mean = x * (1 + scale**2 * dt / (2 * s)) + v * (1 + scale**2 * (1 - s) / (2 * s)) * dt
    return mean, scale * math.sqrt(-dt)


@pytest.mark.parametrize("kernel", STOCHASTIC, ids=NAME)
@pytest.mark.parametrize(("s", "t"), LEVELS)
def test_a_step_is_the_published_gaussian_and_its_score_the_closed_form_density(kernel: Kernel, s: float, t: float):
    x, v, z = draw(3)
    mean, std = published(kernel, x, v, s, t)
    done = transition(kernel, x, v, s, t, noise=z)
    close = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(done.mean, mean, **close)
    torch.testing.assert_close(done.next, mean + std * z, **close)
    assert done.std == pytest.approx(std, rel=1e-12)
    density = torch.distributions.Normal(mean, std).log_prob(mean + std * z)
    assert done.log_prob is not None
    torch.testing.assert_close(done.log_prob, density.flatten(1).mean(1), **close)


@pytest.mark.parametrize("kernel", STOCHASTIC, ids=NAME)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scoring_what_was_drawn_and_stored_gives_the_bits_of_drawing_it(kernel: Kernel, dtype: torch.dtype):
    x, v, z = draw(3, torch.float32)
    drawn = transition(kernel, x, v, 0.8, 0.45, noise=z, storage_dtype=dtype)
    stored = drawn.next.to(dtype)
    scored = transition(kernel, x, v, 0.8, 0.45, next=stored, storage_dtype=dtype)
    assert drawn.log_prob is not None and scored.log_prob is not None
    assert torch.equal(scored.log_prob, drawn.log_prob) and torch.equal(scored.next, drawn.next)
    assert torch.equal(stored.float(), drawn.next)
    assert drawn.mean.dtype == torch.float32


@pytest.mark.parametrize("name", ["ode", "flow_sde", "dance_sde", "flash_sde", "cps"])
def test_without_noise_each_kernel_is_the_step_of_euler(name):
    x, v = draw(2)
    done = transition(Kernel(name, eta=0.0), x, v, 0.8, 0.45)
    assert torch.equal(done.next, x + (0.45 - 0.8) * v)
    assert done.std == 0 and done.log_prob is None


def test_cps_at_eta_1_estimates_the_clean_sample_and_noises_it_afresh_as_few_step_models_do():
    x, v, z = draw(3, torch.float32)
    done = transition(RENOISE, x, v, 0.8, 0.45, noise=z)
    assert torch.equal(done.next, (1 - 0.45) * clean_estimate(x, v, 0.8) + 0.45 * z)
    assert done.std == 0.45
    scheduler = FewStepSchedulerConfig().setup()
    for step in scheduler.steps:
        served = scheduler.transition(x, v, step, lambda: z)
        assert torch.equal(served, transition(step.kernel, x, v, step.sigma, step.sigma_next, noise=z).next)


def test_the_last_step_of_cps_is_deterministic_and_that_of_the_equations_is_not():
    x, v, z = draw(3)
    assert transition(RENOISE, x, v, 0.6, 0.0).log_prob is None
    for kernel in STOCHASTIC[:3]:
        assert transition(kernel, x, v, 0.6, 0.0, noise=z).log_prob is not None


def test_dance_is_flow_with_a_constant_noise_scale():
    x, v, z = draw(3)
    s, t, scale = 0.6, 0.5, 0.35
    dance = transition(Kernel("dance_sde", eta=scale), x, v, s, t, noise=z)
    flow = transition(Kernel("flow_sde", eta=scale / math.sqrt(s / (1 - s))), x, v, s, t, noise=z)
    torch.testing.assert_close(dance.next, flow.next, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(dance.log_prob, flow.log_prob, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cap", [0.9, 0.99])
def test_the_cap_replaces_a_level_of_1_and_no_other(cap: float):
    kernel = Kernel("flow_sde", eta=0.7, sigma_cap=cap)
    assert kernel.std(1.0, 0.5) == pytest.approx(0.7 * math.sqrt(1 / (1 - cap)) * math.sqrt(0.5))
    assert kernel.std(0.995, 0.5) == pytest.approx(0.7 * math.sqrt(0.995 / 0.005) * math.sqrt(0.495))


@pytest.mark.parametrize("kernel", [EULER, *STOCHASTIC], ids=NAME)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_level_per_sample_gives_the_bits_of_each_sample_alone(kernel: Kernel, dtype: torch.dtype):
    x, v, z = draw(3, dtype)
    high, low = torch.tensor([1.0, 0.8, 0.6]), torch.tensor([0.9375, 0.45, 0.5])
    together = transition(kernel, x, v, high, low, noise=z)
    for i in range(3):
        one = slice(i, i + 1)
        alone = transition(kernel, x[one], v[one], high[i].item(), low[i].item(), noise=z[one])
        assert torch.equal(together.next[one], alone.next) and torch.equal(together.mean[one], alone.mean)
        if alone.log_prob is None:
            assert together.log_prob is None
        else:
            assert torch.equal(together.log_prob[one], alone.log_prob)
            assert together.std[i].item() == alone.std


def test_levels_of_which_only_some_are_deterministic_are_refused():
    x, v, z = draw(3)
    with pytest.raises(ValueError, match=r"deterministic for samples \[1\]"):
        transition(RENOISE, x, v, torch.tensor([0.8, 0.6, 0.6]), torch.tensor([0.6, 0.0, 0.5]), noise=z)


def test_the_surrogate_is_the_negative_squared_distance():
    x, v, z = draw(3)
    done = transition(RENOISE, x, v, 0.8, 0.45, noise=z, score="surrogate")
    torch.testing.assert_close(done.log_prob, -((0.45 * z) ** 2).flatten(1).mean(1), rtol=1e-12, atol=1e-12)


def test_what_is_masked_stays_and_counts_for_nothing():
    x, v, z = draw(3)
    mask = torch.tensor([False, True])[None, None, :, None, None]  # the second of two frames
    done = transition(STOCHASTIC[0], x, v, 0.8, 0.45, noise=z, mask=mask)
    assert torch.equal(done.next[:, :, 0], x[:, :, 0]) and torch.equal(done.mean[:, :, 0], x[:, :, 0])
    of_one = [tensor[:, :, 1:] for tensor in (x, v, z)]
    alone = transition(STOCHASTIC[0], of_one[0], of_one[1], 0.8, 0.45, noise=of_one[2])
    assert torch.equal(done.next[:, :, 1:], alone.next)
    torch.testing.assert_close(done.log_prob, alone.log_prob, rtol=1e-14, atol=1e-14)
    v[:, :, 0] = math.nan
    again = transition(STOCHASTIC[0], x, v, 0.8, 0.45, noise=z, mask=mask)
    assert torch.equal(again.log_prob, done.log_prob), "a flow that counts for nothing may be anything"


@pytest.mark.parametrize("kernel", STOCHASTIC, ids=NAME)
def test_the_gradient_goes_through_the_mean_alone(kernel: Kernel):
    """The same when drawing as when scoring: what was drawn is a constant."""
    x, v, z = draw(3)
    v.requires_grad_()
    drawn = transition(kernel, x, v, 0.8, 0.45, noise=z)
    (of_draw,) = torch.autograd.grad(drawn.log_prob.sum(), v)
    next = drawn.next.detach()
    (of_score,) = torch.autograd.grad(transition(kernel, x, v, 0.8, 0.45, next=next).log_prob.sum(), v)
    assert torch.equal(of_draw, of_score) and of_draw.abs().max() > 0
    small = [tensor.detach()[:, :1, :1, :1] for tensor in (x, v, next)]
    small[1].requires_grad_()
    assert torch.autograd.gradcheck(
        lambda v: transition(kernel, small[0], v, 0.8, 0.45, next=small[2]).log_prob, small[1]
    )


@pytest.mark.parametrize(
    ("name", "config"), [("unipc", UniPCSchedulerConfig(num_steps=6)), ("dpmpp", DPMPPSchedulerConfig(num_steps=6))]
)
def test_a_solver_looks_back_over_its_own_steps_and_forgets_them_at_another_kernels(name, config):
    scheduler = config.setup()
    x, v, z = draw(3)

    def run(steps, state: SolverState) -> Tensor:
        y = x
        for step in steps:
            done = transition(step.kernel, y, v.tanh() * y, step.sigma, step.sigma_next, state=state)
            assert done.log_prob is None
            y = done.next
        return y

    served, state = x, scheduler.begin()
    for step in scheduler.steps:
        served = scheduler.transition(served, v.tanh() * served, step, lambda: pytest.fail("drawn"), state)
    assert {step.kernel.name for step in scheduler.steps} == {name}
    assert torch.equal(run(scheduler.steps, SolverState()), served)

    state = SolverState()
    run(scheduler.steps[:3], state)
    assert len(state.estimates) == 2
    transition(STOCHASTIC[0], x, v, 0.8, 0.45, noise=z, state=state)
    assert state == SolverState()
    assert torch.equal(run(scheduler.steps[3:], state), run(scheduler.steps[3:], SolverState()))


def test_kernels_go_through_json():
    for kernel in (EULER, *STOCHASTIC):
        assert Kernel.from_dict(json.loads(json.dumps(kernel.to_dict()))) == kernel


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "euler"}, "kernel 'euler' is not known; choose one of ode,"),
        ({"name": "cps", "eta": 1.5}, "eta of kernel cps is 1.5; expected 0"),
        ({"name": "flow_sde", "eta": -0.1}, "eta of kernel flow_sde is -0.1; expected a finite number from 0"),
        ({"name": "flow_sde", "eta": math.nan}, "eta of kernel flow_sde is nan"),
        ({"name": "flow_sde", "eta": "1"}, "eta of kernel flow_sde is '1'"),
        ({"name": "flow_sde", "sigma_cap": 1.0}, "sigma_cap is 1.0; expected a noise level between 0 and 1"),
        ({"name": "boundary", "boundary": 0.0}, "boundary is 0.0"),
        ({"name": "flash_sde", "sigma_min": 0.9, "sigma_max": 0.5}, "sigma_min 0.9 and sigma_max 0.5 are not in order"),
        ({"name": "ode", "strength": 1}, "a kernel has no strength; its fields are boundary, eta"),
        ({"eta": 1.0}, "a kernel needs a name"),
    ],
)
def test_a_kernel_that_cannot_be_is_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        Kernel.from_dict(values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"noise": None}, "is stochastic from sigma 0.8 to 0.45; give noise, or next to score"),
        ({"next": torch.zeros(SHAPE)}, "both noise and next were given"),
        ({"sigma": 0.4}, "from sigma 0.4 to 0.45 does not lead down"),
        ({"sigma": 1.5}, "from sigma 1.5 to 0.45 does not lead down within 0 to 1"),
        ({"sigma": math.nan}, "from sigma nan to 0.45"),
        ({"sigma": torch.tensor([0.8, 0.7])}, "2 noise levels were given for 3 samples"),
        ({"flow": torch.zeros(3)}, r"flow has shape \[3\]; expected that of x"),
        ({"noise": torch.zeros(3)}, r"noise has shape \[3\]"),
        ({"flow": torch.full(SHAPE, math.nan)}, "not finite: 216 in flow"),
        ({"x": torch.full(SHAPE, math.inf)}, "not finite: 216 in x"),
        ({"noise": torch.full(SHAPE, 1e6), "storage_dtype": torch.float16}, "not finite: 216 in next"),
        ({"score": "likelihood"}, "score is 'likelihood'; choose one of gaussian, surrogate"),
        ({"mask": torch.ones(3)}, r"mask is torch.float32 \[3\]; expected bool, broadcastable"),
        ({"mask": torch.ones(1, 1, 3, 1, 1, dtype=torch.bool)}, r"mask is torch.bool \[1, 1, 3, 1, 1\]"),
        ({"mask": torch.tensor([True, False, True]).view(3, 1, 1, 1, 1)}, "a sample has no active element"),
        ({"kernel": Kernel("unipc")}, "unipc looks back over a chunk's steps; give it the state"),
    ],
)
def test_a_step_that_cannot_be_taken_is_refused(change, message):
    given = {"kernel": RENOISE, "x": torch.ones(SHAPE), "flow": torch.ones(SHAPE), "noise": torch.ones(SHAPE)}
    given |= {"sigma": 0.8, "sigma_next": 0.45}
    with pytest.raises(ValueError, match=message):
        transition(**(given | change))
