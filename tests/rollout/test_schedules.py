"""Which steps are stochastic."""

from __future__ import annotations

from collections import Counter

import pytest

from flashdreams.config import ConfigError
from flashdreams.rollout.schedules import AllSteps, Window

pytestmark = pytest.mark.ci_cpu


def test_all_steps_or_a_fraction_of_them():
    assert AllSteps().stochastic(4, rollout=0) == (0, 1, 2, 3)
    assert AllSteps(fraction=(0.0, 0.5)).stochastic(14, rollout=3) == (0, 1, 2, 3, 4, 5, 6)
    assert AllSteps(fraction=(0.25, 0.99)).stochastic(8, rollout=3) == (2, 3, 4, 5, 6), "rounded down at both ends"
    assert AllSteps(fraction=(0.5, 0.5)).stochastic(8, rollout=0) == ()


def test_some_steps_are_drawn_anew_for_each_rollout_and_alike_by_all_workers():
    schedule = AllSteps(fraction=(0.2, 0.8), num_steps=2)
    draws = [schedule.stochastic(10, rollout) for rollout in range(300)]
    assert draws == [AllSteps(fraction=(0.2, 0.8), num_steps=2).stochastic(10, rollout) for rollout in range(300)]
    assert all(len(set(draw)) == 2 and list(draw) == sorted(draw) for draw in draws)
    counts = Counter(step for draw in draws for step in draw)
    assert set(counts) == set(range(2, 8)) and min(counts.values()) > 60, "100 each are expected"
    assert AllSteps(num_steps=0).stochastic(10, rollout=5) == ()


def test_a_progressive_window_moves_after_its_rollouts_and_stays_at_the_last_whole_one():
    window = Window(size=4, rollouts=25)
    assert window.stochastic(14, 0) == window.stochastic(14, 24) == (0, 1, 2, 3)
    assert window.stochastic(14, 25) == (4, 5, 6, 7)
    assert window.stochastic(14, 50) == window.stochastic(14, 10_000) == (8, 9, 10, 11), "12 and 13 are no whole window"


def test_windows_may_overlap_begin_later_and_come_round_again():
    overlapping = Window(size=3, rollouts=1, overlap=2, first=1)
    assert [overlapping.stochastic(6, i)[0] for i in range(5)] == [1, 2, 3, 3, 3]
    rolling = Window(size=4, rollouts=10, roll_back=True)
    assert [rolling.stochastic(14, 10 * i)[0] for i in range(5)] == [0, 4, 8, 0, 4]


def test_a_random_window_begins_anywhere_it_fits():
    window = Window(strategy="random", size=4)
    draws = [window.stochastic(6, rollout) for rollout in range(60)]
    assert draws == [window.stochastic(6, rollout) for rollout in range(60)]
    assert set(draws) == {(0, 1, 2, 3), (1, 2, 3, 4), (2, 3, 4, 5)}
    assert window.stochastic(4, 17) == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AllSteps(fraction=(0.5, 0.2)), r"fraction is \(0.5, 0.2\); expected two numbers from 0 to 1"),
        (lambda: AllSteps(fraction=(0.0, 1.5)), r"fraction is \(0.0, 1.5\)"),
        (lambda: AllSteps(num_steps=-1), "num_steps is -1; expected 0 or more"),
        (lambda: AllSteps(num_steps=5).stochastic(4, 0), r"num_steps is 5, and \(0.0, 1.0\) of 4 steps are 4"),
        (lambda: AllSteps().stochastic(0, 0), "0 steps and rollout number 0"),
        (lambda: AllSteps().stochastic(4, -1), "4 steps and rollout number -1"),
        (lambda: Window(strategy="backwards"), "strategy is 'backwards'; expected progressive or random"),
        (lambda: Window(size=0), "size of a window is 0"),
        (lambda: Window(rollouts=0), "rollouts of a window is 0"),
        (
            lambda: Window(size=2, overlap=2),
            "overlap 2; expected a step from 0, and an overlap from 0 to below the size, 2",
        ),
        (lambda: Window(first=-1), "first is -1"),
        (lambda: Window(size=4, first=1).stochastic(4, 0), "4 steps from step 1 does not fit in 4; make it smaller"),
    ],
)
def test_what_cannot_be_scheduled_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
