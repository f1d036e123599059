"""DiffusionNFT against its formula, and against the policy it is known to lead to."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from flashdreams.rollout.losses_nft import diffusion_nft

pytestmark = pytest.mark.ci_cpu

SHAPE = (3, 2, 4)


def given() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    velocity, old, clean, noise = (torch.randn(SHAPE, generator=generator, dtype=torch.float64) for _ in range(4))
    sigma = torch.tensor([0.2, 0.5, 0.9], dtype=torch.float64)
    level = sigma[:, None, None]
    return {
        "velocity": velocity,
        "old_velocity": old,
        "clean": clean,
        "noisy": (1 - level) * clean + level * noise,
        "sigma": sigma,
        "advantages": torch.tensor([1.0, -2.0, 8.0], dtype=torch.float64),
    }


def reference(of: dict[str, Tensor], beta: float, limit: float, normalise: bool) -> float:
    """Sample by sample, as published."""
    total = 0.0
    for v, old, x0, xt, t, a in zip(*of.values(), strict=True):
        errors = []
        for mixed in (beta * v + (1 - beta) * old, (1 + beta) * old - beta * v):
            gap = xt - t * mixed - x0
            errors.append((gap**2).mean() / (gap.abs().mean() if normalise else 1))
        r = min(max(a.item(), -limit), limit) / (2 * limit) + 0.5
        total += limit * (r * errors[0] + (1 - r) * errors[1]).item() / beta
    return total / len(of["clean"])


@pytest.mark.parametrize("beta", [1.0, 0.3])
@pytest.mark.parametrize("normalise", [True, False])
def test_the_loss_is_the_published_one(beta: float, normalise: bool):
    of = given()
    loss = diffusion_nft(**of, beta=beta, normalise=normalise)
    assert loss.value.item() == pytest.approx(reference(of, beta, 5.0, normalise), rel=1e-12)
    assert loss.metrics["clip_fraction"] == pytest.approx(1 / 3)
    assert loss.metrics["positive_share"] == pytest.approx((0.6 + 0.3 + 1.0) / 3)
    change = (of["velocity"] - of["old_velocity"]).square().mean().sqrt().item()
    assert loss.metrics["velocity_change"] == pytest.approx(change)


def test_the_gradient_reaches_the_policy_alone_and_is_that_of_finite_differences():
    of = given()
    of["old_velocity"].requires_grad_()
    of["velocity"].requires_grad_()
    loss = diffusion_nft(**of, normalise=False)
    loss.value.backward()
    assert of["old_velocity"].grad is None and of["velocity"].grad.abs().max() > 0
    velocity = of.pop("velocity").detach().requires_grad_()
    of["old_velocity"] = of["old_velocity"].detach()
    assert torch.autograd.gradcheck(lambda v: diffusion_nft(v, **of, normalise=False).value, velocity)


def test_errors_are_divided_by_numbers_through_which_no_gradient_goes():
    of = {name: value[:1] for name, value in given().items()}
    velocity = of["velocity"].requires_grad_()
    diffusion_nft(**of).value.backward()
    terms = []
    for flow, share in ((velocity, 0.6), (2 * of["old_velocity"] - velocity, 0.4)):
        gap = of["noisy"] - 0.2 * flow - of["clean"]
        terms.append(5 * share * gap.square().mean() / gap.abs().mean().item())
    want = torch.autograd.grad(sum(terms), velocity)[0]
    torch.testing.assert_close(velocity.grad, want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("advantage", "better"), [(5.0, True), (0.0, None), (-5.0, False)])
def test_training_leads_towards_what_was_good_and_away_from_what_was_bad(advantage: float, better: bool | None):
    """From the old policy, the step of steepest descent goes along ``advantage * (noise - clean - v_old)``."""
    of = given()
    of["advantages"] = torch.full((3,), advantage, dtype=torch.float64)
    of["velocity"] = of["old_velocity"].clone().requires_grad_()
    diffusion_nft(**of, normalise=False).value.backward()
    target = (of["noisy"] - of["clean"]) / of["sigma"][:, None, None]
    along = (-of["velocity"].grad * (target - of["old_velocity"])).sum().item()
    assert along == pytest.approx(0, abs=1e-12) if better is None else (along > 0) == better


def test_each_active_element_counts_once():
    of = given()
    mask = torch.ones(SHAPE, dtype=torch.bool)
    mask[0, :, 1:] = False  # a quarter of the first sample is left
    parts = [{name: value[i : i + 1] for name, value in of.items()} for i in range(3)]
    parts[0] = {n: v if n in ("sigma", "advantages") else v[:, :, :1] for n, v in parts[0].items()}
    values = [diffusion_nft(**part).value.item() for part in parts]
    want = (2 * values[0] + 8 * values[1] + 8 * values[2]) / 18
    for name in ("velocity", "old_velocity", "noisy"):
        of[name][0, :, 1:] = math.nan
    assert diffusion_nft(**of, mask=mask).value.item() == pytest.approx(want, rel=1e-12)


def test_one_level_for_all_is_that_level_for_each():
    of = given()
    alike = of | {"sigma": torch.full((3,), 0.5, dtype=torch.float64)}
    assert torch.equal(diffusion_nft(**alike).value, diffusion_nft(**(of | {"sigma": 0.5})).value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"beta": 0.0}, "beta is 0.0; expected a finite number above 0"),
        ({"advantage_limit": -1.0}, "advantage_limit is -1.0"),
        ({"velocity": torch.full(SHAPE, math.nan)}, "the loss is not finite"),
        ({"advantages": torch.full((3,), math.nan)}, "the loss is not finite"),
        ({"noisy": torch.ones(3, 2)}, r"noisy has shape \[3, 2\]; expected that of clean"),
        ({"advantages": torch.ones(2)}, r"advantages have shape \[2\]; expected \[3\]"),
        ({"mask": torch.zeros(SHAPE, dtype=torch.bool)}, "leaves a sample without active elements"),
        ({"mask": torch.ones(SHAPE)}, "mask is not bool"),
    ],
)
def test_what_cannot_be_a_loss_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        diffusion_nft(**(given() | change))
