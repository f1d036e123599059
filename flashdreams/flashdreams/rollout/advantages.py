"""Advantages: how much better a sample did than others, which is all that a policy gradient needs of a reward."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor


def group_advantages(
    rewards: Tensor, groups: Sequence[Hashable], *, global_std: bool = False, eps: float = 1e-8
) -> Tensor:
    """Rewards against those of the same group: ``(r - mean) / sqrt(variance + eps)``, with the population's variance.

    Args:
        rewards: ``[B]``, or ``[B, N]`` for a reward per chunk, each column on its own.
        groups: of each sample, such as the number of its prompt; in any order, but all groups of one size.
        global_std: divide by the spread of all samples instead, ``std + eps``, so that groups of near equal rewards
            count for little.

    Returns:
        float32 (or float64, as ``rewards``), of their shape. Compute it over all samples before they are split up.

    Raises:
        ValueError: groups are of several sizes or of one sample, do not fit, or a reward is not finite.
    """
    values = _checked(rewards)
    if len(groups) != len(values):
        raise ValueError(f"{len(groups)} groups were given for {len(values)} rewards; give one for each")
    members: dict[Hashable, list[int]] = {}
    for i, group in enumerate(groups):
        members.setdefault(group, []).append(i)
    sizes = {group: len(rows) for group, rows in members.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"groups are of several sizes, {sizes}; sample each prompt equally often")
    if min(sizes.values()) < 2:
        raise ValueError("groups are of one sample, which has no others to be compared with; sample prompts repeatedly")
    rows = torch.tensor(list(members.values()))  # [groups, members]
    grouped = values[rows]
    gaps = grouped - grouped.mean(1, keepdim=True)
    if global_std:
        scaled = gaps / (values.std(0) + eps)
    else:
        scaled = gaps / (gaps.square().mean(1, keepdim=True) + eps).sqrt()
    result = torch.empty_like(values)
    result[rows] = scaled
    return _as(rewards, result)


def global_advantages(rewards: Tensor, *, eps: float = 1e-8) -> Tensor:
    """Rewards against those of all samples: ``(r - mean) / (std + eps)``, with the unbiased ``std``.

    Args and result as in :func:`group_advantages`.

    Raises:
        ValueError: there are fewer than two samples, or a reward is not finite.
    """
    values = _checked(rewards)
    if len(values) < 2:
        raise ValueError("there is one reward, and no other to compare it with; sample at least two")
    return _as(rewards, (values - values.mean(0)) / (values.std(0) + eps))


def _checked(rewards: Tensor) -> Tensor:
    if rewards.ndim not in (1, 2) or not len(rewards):
        raise ValueError(f"rewards have shape {list(rewards.shape)}; expected [B], or [B, N] for one per chunk")
    bad = (~rewards.isfinite()).reshape(len(rewards), -1).any(1).nonzero().flatten().tolist()
    if bad:
        raise ValueError(f"rewards of samples {bad} are not finite; look at what the reward was given")
    return rewards.detach().cpu().double()


def _as(rewards: Tensor, advantages: Tensor) -> Tensor:
    return advantages.to(rewards.device, torch.float64 if rewards.dtype == torch.float64 else torch.float32)
