"""Policy-gradient losses against loops over their entries, in float64."""

from __future__ import annotations

import math
import statistics
from functools import partial

import pytest
import torch
from torch import Tensor

from flashdreams.infra.scheduler.kernels import Kernel
from flashdreams.infra.scheduler.transitions import transition
from flashdreams.rollout.losses import Loss, clip_range, flow_dppo, flow_grpo, gaussian_kl, grpo_guard

pytestmark = pytest.mark.ci_cpu

SHAPE = (4, 3)
STDS = torch.tensor([0.9, 0.5, 0.2], dtype=torch.float64)


def draw(count: int, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [scale * torch.randn(SHAPE, generator=generator, dtype=torch.float64) for _ in range(count)]


def entries() -> dict[str, Tensor]:
    """Log-probabilities that have moved both ways, by up to 10 times a clip range of 0.01, at advantages of both signs,
    and weights of which one is 0."""
    old, change, kl = draw(3)
    change = change.abs() * torch.tensor([[1, -1, 1], [-1, 1, 1], [-1, 1, -1], [1, -1, -1]])
    weights = torch.tensor([6.0, 12.0, 12.0], dtype=torch.float64).repeat(4, 1)
    weights[2, 1] = 0
    return {
        "log_probs": old + 0.05 * change,
        "old_log_probs": old,
        "advantages": torch.tensor([1.5, -0.5, 0.25, -2.0], dtype=torch.float64),
        "kl_to_old": 1e-3 * kl.abs(),
        "weights": weights,
    }


def of_entries(term, given: dict[str, Tensor]) -> float:
    """Weighted mean of ``term(change of log-probability, advantage, KL, std)``, one entry after the other."""
    total = weight = 0.0
    for b in range(SHAPE[0]):
        for s in range(SHAPE[1]):
            change = (given["log_probs"][b, s] - given["old_log_probs"][b, s]).item()
            value = term(change, given["advantages"][b].item(), given["kl_to_old"][b, s].item(), STDS[s].item())
            total += given["weights"][b, s].item() * value
            weight += given["weights"][b, s].item()
    return total / weight


def run(loss, given: dict[str, Tensor], **options) -> Loss:
    names = {
        flow_grpo: (),
        grpo_guard: ("kl_to_old",),
        flow_dppo: ("kl_to_old",),
    }[loss]
    options |= {"stds": STDS} if loss is grpo_guard else {}
    common = {name: given[name] for name in ("log_probs", "old_log_probs", "advantages", "weights", *names)}
    return loss(**common, **options)


def clipped(log_ratio: float, advantage: float) -> float:
    ratio = math.exp(log_ratio)
    return max(-advantage * ratio, -advantage * min(max(ratio, 0.99), 1.01))


def test_flow_grpo_is_the_clipped_gradient_weighted_by_active_elements():
    given = entries()
    want = of_entries(lambda change, a, kl, std: clipped(change, a), given)
    assert run(flow_grpo, given, clip=0.01).value.item() == pytest.approx(want, rel=1e-12)
    unweighted = given | {"weights": torch.ones(SHAPE, dtype=torch.float64)}
    want = of_entries(lambda change, a, kl, std: clipped(change, a), unweighted)
    assert run(flow_grpo, given | {"weights": None}, clip=0.01).value.item() == pytest.approx(want, rel=1e-12)


def test_grpo_guard_clips_ratios_that_are_normalised_by_the_step():
    given = entries()
    want = of_entries(lambda change, a, kl, std: clipped(std * change + std * kl, a), given)
    assert run(grpo_guard, given, clip=0.01).value.item() == pytest.approx(want, rel=1e-12)


def test_flow_dppo_drops_what_is_far_and_would_go_further():
    given, threshold = entries(), 5e-4

    def term(change, a, kl, std):
        away = (change > 0 and a > 0) or (change < 0 and a < 0)
        return 0.0 if kl >= threshold and away else -a * math.exp(change)

    assert run(flow_dppo, given, threshold=threshold).value.item() == pytest.approx(of_entries(term, given), rel=1e-12)
    dropped = of_entries(lambda *entry: float(term(*entry) == 0), given)
    metrics = run(flow_dppo, given, threshold=threshold).metrics
    assert 0 < dropped < 1 and metrics["clip_fraction"] == pytest.approx(dropped)


def test_flow_dppo_survives_a_dropped_ratio_that_overflows():
    log_probs = torch.tensor([[1e4, 0.0]], dtype=torch.float64, requires_grad=True)
    far = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    loss = flow_dppo(log_probs, torch.zeros_like(log_probs), torch.ones(1, dtype=torch.float64), far)
    loss.value.backward()
    assert log_probs.grad.tolist() == [[0.0, -0.5]]


@pytest.mark.parametrize("loss", [flow_grpo, grpo_guard, flow_dppo])
def test_at_the_policy_that_sampled_the_gradient_is_the_plain_policy_gradient(loss):
    """The ratio is exactly 1; the gradient of an entry is ``-A`` times its share of the weight (and its std)."""
    given = entries()
    given["log_probs"] = given["old_log_probs"].clone().requires_grad_()
    given["old_log_probs"].requires_grad_()
    given["kl_to_old"] = torch.zeros(SHAPE, dtype=torch.float64)
    result = run(loss, given)
    result.value.backward()
    want = -given["advantages"][:, None] * given["weights"] / given["weights"].sum()
    want = want * STDS if loss is grpo_guard else want
    torch.testing.assert_close(given["log_probs"].grad, want, rtol=1e-12, atol=1e-15)
    assert given["old_log_probs"].grad is None
    assert result.metrics["ratio_min"] == result.metrics["ratio_max"] == 1
    assert result.metrics["clip_fraction"] == result.metrics["log_prob_change_max"] == result.metrics["approx_kl"] == 0


@pytest.mark.parametrize("loss", [partial(run, flow_grpo), partial(run, grpo_guard), partial(run, flow_dppo)])
def test_gradients_are_those_of_finite_differences(loss):
    given = entries()

    def value(log_probs, kl_to_old):
        return loss(given | {"log_probs": log_probs, "kl_to_old": kl_to_old}).value

    moved = given["log_probs"].requires_grad_()
    guarded = given["kl_to_old"].requires_grad_(loss.args[0] is grpo_guard)
    options = {"clip": 0.01} if loss.args[0] is not flow_dppo else {"threshold": 5e-4}
    loss = partial(loss, **options)
    assert torch.autograd.gradcheck(value, (moved, guarded))


def test_the_ratios_of_grpo_guard_are_centred_and_equally_wide_at_every_level():
    """A mean that has moved by ``d`` gives ``log r = mean(z d)`` over its elements: no step's std is in it."""
    generator = torch.Generator().manual_seed(1)
    x, v, z, push = (torch.randn(64, 50, generator=generator, dtype=torch.float64) for _ in range(4))
    kernel = Kernel("cps", eta=0.7)
    for s, t in ((0.9, 0.7), (0.3, 0.1)):
        old = transition(kernel, x, v, s, t, noise=z)
        moved = 0.01 * push
        new = old.log_prob + ((old.std * z) ** 2 - (old.std * z - moved) ** 2).mean(1) / (2 * old.std**2)
        kl = gaussian_kl(old.mean + moved, old.mean, old.std)
        stds = torch.tensor([old.std], dtype=torch.float64)
        result = grpo_guard(new[:, None], old.log_prob[:, None], torch.ones(64), kl[:, None], stds)
        want = (z * moved).mean(1).exp()
        assert result.metrics["ratio_max"] == pytest.approx(want.max().item(), rel=1e-12)
        assert result.metrics["ratio_std"] == pytest.approx(want.std(correction=0).item(), rel=1e-9)


def test_divergence_from_a_reference_is_the_gaussian_one_over_active_elements():
    x, y = torch.randn(2, 3, 4, dtype=torch.float64), torch.randn(2, 3, 4, dtype=torch.float64)
    std = torch.tensor([0.3, 0.5], dtype=torch.float64)
    normals = [torch.distributions.Normal(mean, std[:, None, None]) for mean in (x, y)]
    want = torch.distributions.kl_divergence(*normals)
    torch.testing.assert_close(gaussian_kl(x, y, std), want.flatten(1).mean(1))
    mask = torch.tensor([True, False, True])[None, :, None]
    torch.testing.assert_close(gaussian_kl(x, y, std, mask), want[:, [0, 2]].flatten(1).mean(1))
    assert gaussian_kl(x, x, 0.3).eq(0).all()


def test_a_reference_adds_its_weighted_divergence():
    given, (kl,) = entries(), draw(1)
    plain, held = run(flow_grpo, given), run(flow_grpo, given, kl=kl.abs(), kl_coefficient=0.1)
    want = (kl.abs() * given["weights"]).sum().item() / given["weights"].sum().item()
    assert held.value.item() == pytest.approx(plain.value.item() + 0.1 * want, rel=1e-12)
    assert held.metrics["kl"] == pytest.approx(want) and "kl" not in plain.metrics


def test_metrics_say_how_far_the_policy_has_gone():
    given = entries()
    metrics = run(flow_grpo, given, clip=0.01).metrics
    counted = [(b, s) for b in range(4) for s in range(3) if given["weights"][b, s] > 0]
    changes = [(given["log_probs"] - given["old_log_probs"])[entry].item() for entry in counted]
    ratios, mean = [math.exp(change) for change in changes], of_entries(lambda change, *_: math.exp(change), given)
    assert metrics == pytest.approx(
        {
            "ratio_mean": mean,
            "ratio_std": math.sqrt(of_entries(lambda change, *_: (math.exp(change) - mean) ** 2, given)),
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
            "approx_kl": of_entries(lambda change, *_: change**2 / 2, given),
            "log_prob_change_mean": of_entries(lambda change, *_: abs(change), given),
            "log_prob_change_max": max(map(abs, changes)),
            "clip_fraction": of_entries(lambda change, *_: float(abs(math.exp(change) - 1) > 0.01), given),
        },
        rel=1e-9,
    )
    assert statistics.fmean(ratios) != pytest.approx(mean, rel=1e-6), "weighted"


def test_what_is_masked_may_hold_anything():
    given = entries()
    want = run(grpo_guard, given)
    for name in ("log_probs", "old_log_probs", "kl_to_old"):
        given[name][2, 1] = math.nan
    given["log_probs"].requires_grad_()
    got = run(grpo_guard, given)
    got.value.backward()
    assert got.value.item() == want.value.item() and got.metrics == want.metrics
    assert given["log_probs"].grad.isfinite().all()


def test_an_advantage_per_entry_is_taken_as_it_is():
    given = entries()
    spread = given | {"advantages": given["advantages"][:, None].repeat(1, 3)}
    assert torch.equal(run(flow_grpo, spread).value, run(flow_grpo, given).value)


def test_clip_ranges_shrink_by_the_published_schedules():
    assert [clip_range(1e-4, p) for p in (0, 1)] == [1e-4, 1e-4]
    assert clip_range(1e-4, 0.5, "linear") == pytest.approx(0.75e-4)
    assert clip_range(1e-4, 0.5, "cosine") == pytest.approx(0.5e-4)
    with pytest.raises(ValueError, match="progress is 1.5"):
        clip_range(1e-4, 1.5)
    with pytest.raises(ValueError, match="schedule is 'steps'; expected one of constant, linear, cosine"):
        clip_range(1e-4, 0.5, "steps")


def test_what_cannot_be_a_loss_is_refused():
    given = entries()
    bad = given["log_probs"].clone()
    bad[1, 2] = math.nan
    for change, message in (
        ({"log_probs": bad}, r"log_probs are not finite at \[1, 2\]"),
        ({"old_log_probs": bad}, r"old_log_probs are not finite at \[1, 2\]"),
        ({"advantages": torch.full((4,), math.inf)}, "advantages are not finite"),
        ({"advantages": torch.ones(3)}, r"advantages have shape \[3\]; expected \[4, 3\]"),
        ({"old_log_probs": torch.ones(4, 2)}, r"old_log_probs have shape \[4, 2\]"),
        ({"log_probs": torch.ones(4)}, r"log_probs have shape \[4\]; expected \[B, S\]"),
        ({"weights": torch.zeros(SHAPE)}, "weights are negative, not finite, or all 0"),
        ({"weights": torch.full(SHAPE, -1.0)}, "weights are negative"),
        ({"log_probs": given["old_log_probs"] + 1e4, "advantages": -torch.ones(4)}, "the policy has gone too far"),
    ):
        with pytest.raises(ValueError, match=message):
            run(flow_grpo, given | change)
    for loss, options, message in (
        (flow_grpo, {"clip": 0.0}, "clip is 0.0; expected a range above 0"),
        (flow_grpo, {"kl_coefficient": 0.1}, "kl_coefficient is 0.1; expected one above 0 together with kl"),
        (flow_grpo, {"kl": torch.ones(SHAPE)}, "kl_coefficient is 0.0"),
        (flow_dppo, {"threshold": 0.0}, "threshold is 0.0"),
    ):
        with pytest.raises(ValueError, match=message):
            run(loss, given, **options)
    names = ("log_probs", "old_log_probs", "advantages", "kl_to_old")
    with pytest.raises(ValueError, match="a std is not above 0"):
        grpo_guard(*(given[name] for name in names), torch.zeros(3))
