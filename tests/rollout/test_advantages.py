"""Advantages against loops."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from flashdreams.rollout.advantages import global_advantages, group_advantages

pytestmark = pytest.mark.ci_cpu

REWARDS = torch.tensor([1.0, 2.0, 0.5, 0.25, -1.0, 4.0], dtype=torch.float64)
GROUPS = ["a", "b", "a", "b", "b", "a"]


@pytest.mark.parametrize("global_std", [False, True])
def test_a_group_is_compared_within_itself(global_std: bool):
    rewards, want = REWARDS.tolist(), []
    for reward, group in zip(rewards, GROUPS, strict=True):
        own = [r for r, g in zip(rewards, GROUPS, strict=True) if g == group]
        spread = statistics.stdev(rewards) + 1e-8 if global_std else math.sqrt(statistics.pvariance(own) + 1e-8)
        want.append((reward - statistics.mean(own)) / spread)
    got = group_advantages(REWARDS, GROUPS, global_std=global_std)
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_a_reward_per_chunk_is_compared_chunk_by_chunk():
    per_chunk = torch.stack((REWARDS, 3 * REWARDS.flip(0)), dim=1)
    got = group_advantages(per_chunk, GROUPS)
    assert torch.equal(got[:, 1], group_advantages(per_chunk[:, 1], GROUPS))


def test_all_are_compared_with_all():
    rewards = REWARDS.tolist()
    want = [(r - statistics.mean(rewards)) / (statistics.stdev(rewards) + 1e-8) for r in rewards]
    torch.testing.assert_close(global_advantages(REWARDS), torch.tensor(want, dtype=torch.float64))


def test_equal_rewards_give_no_advantage_and_float32_comes_back_for_anything_less_than_float64():
    assert group_advantages(torch.ones(4), [0, 0, 1, 1]).eq(0).all()
    assert group_advantages(torch.tensor([1, 0, 1, 0]), [0, 0, 1, 1]).dtype == torch.float32
    assert global_advantages(torch.ones(4, dtype=torch.bfloat16)).dtype == torch.float32


@pytest.mark.parametrize(
    ("rewards", "groups", "message"),
    [
        ([1.0, 2.0, 3.0], ["a", "b", "a"], r"groups are of several sizes, \{'a': 2, 'b': 1\}"),
        ([1.0, 2.0], ["a", "b"], "groups are of one sample"),
        ([1.0, 2.0], ["a"], "1 groups were given for 2 rewards"),
        ([1.0, math.nan, math.inf, 0.0], ["a"] * 4, r"rewards of samples \[1, 2\] are not finite"),
        ([], [], r"rewards have shape \[0\]"),
        ([[[1.0]]], ["a"], r"rewards have shape \[1, 1, 1\]; expected \[B\], or \[B, N\]"),
    ],
)
def test_rewards_that_cannot_be_compared_are_refused(rewards, groups, message):
    with pytest.raises(ValueError, match=message):
        group_advantages(torch.tensor(rewards), groups)


def test_one_reward_alone_is_refused():
    with pytest.raises(ValueError, match="there is one reward"):
        global_advantages(torch.ones(1))
