"""The few-step sampler whose levels are found by whole timesteps: published values, and the trap in finding them."""

from __future__ import annotations

import pytest
import torch

from flashdreams.config import ConfigError
from flashdreams.infra.scheduler import IndexedFewStepSchedulerConfig, tables
from flashdreams.infra.scheduler.config import with_solver

pytestmark = pytest.mark.ci_cpu

# shift, indices, timesteps, levels of the estimates, levels that noise is added to (none before the first step)
PUBLISHED = [
    (10.0, (0, 250, 500, 750), [999, 967, 908, 768], [0.9998999, 0.9679494, 0.9089255, 0.7689939],
     [0.9677834, 0.9085941, 0.7680442]),
    (5.0, (0, 179, 358, 679), [999, 957, 899, 702], [0.9997998, 0.9579928, 0.8998038, 0.7024067],
     [0.9577199, 0.8994113, 0.7024067]),
]  # fmt: skip


@pytest.mark.parametrize(("shift", "indices", "timesteps", "estimated", "noised"), PUBLISHED)
def test_the_steps_are_the_published_ones(shift, indices, timesteps, estimated, noised) -> None:
    scheduler = IndexedFewStepSchedulerConfig(shift=shift, indices=indices).setup()
    assert [step.timestep for step in scheduler.steps] == timesteps
    assert [step.sigma for step in scheduler.steps] == pytest.approx(estimated, abs=6e-8)
    assert [step.sigma_next for step in scheduler.steps] == pytest.approx([*noised, 0.0], abs=6e-8)
    assert scheduler.sigmas(4).tolist() == pytest.approx([*estimated, 0.0], abs=6e-8)
    assert scheduler.timesteps(4).tolist() == timesteps


def test_noise_is_added_to_the_second_level_of_a_timestep_where_there_are_several() -> None:
    """Written out over the whole table: of 702 at shift 5 there is one alone."""
    for shift, indices, timesteps, *_ in PUBLISHED:
        table = tables.native_unipc(1000, shift)[:-1]
        steps = IndexedFewStepSchedulerConfig(shift=shift, indices=indices).setup().steps
        for step, following in zip(steps, timesteps[1:]):
            first, *rest = [level for level in table if int(1000 * level) == following]
            assert step.sigma_next == (rest[0] if rest else first)
            assert steps[step.index + 1].sigma == first


def test_a_transition_is_the_estimate_noised_anew_and_the_last_one_is_the_estimate() -> None:
    scheduler = IndexedFewStepSchedulerConfig().setup()
    x, flow, noise = torch.randn(3, 1, 4, 2, 2, 2).unbind(0)
    first, *_, last = scheduler.steps
    clean = (x.double() - first.sigma * flow.double()).float()
    moved = scheduler.transition(x, flow, first, lambda: noise)
    torch.testing.assert_close(moved, (1 - 0.9677834) * clean + 0.9677834 * noise, rtol=1e-5, atol=1e-6)

    def nothing() -> torch.Tensor:
        raise AssertionError("the last step draws nothing")

    clean = (x.double() - last.sigma * flow.double()).float()
    assert torch.equal(scheduler.transition(x, flow, last, nothing), clean)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"indices": (250, 0, 500, 750)}, "rising whole numbers from 0 to 999"),
        ({"indices": (0, 250, 500, 1000)}, "rising whole numbers from 0 to 999"),
        ({"indices": ()}, "rising whole numbers"),
        ({"num_steps": 3}, "distilled for the 4 steps"),
        ({"shift": 0.0}, "shift is 0.0"),
        ({"indices": (0, 1, 500, 750)}, "share timesteps"),
    ],
)
def test_what_it_cannot_do_is_refused(fields: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        IndexedFewStepSchedulerConfig(**fields).setup()


def test_a_distilled_model_takes_no_other_solver_and_no_other_number_of_steps() -> None:
    config = IndexedFewStepSchedulerConfig()
    with pytest.raises(ConfigError, match="takes no other solver"):
        with_solver(config, "unipc")
    with pytest.raises(ConfigError, match="distilled for those at"):
        config.setup().sigmas(3)
