"""DiffusionNFT: a policy improved by the forward process, without log-probabilities or stored steps."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flashdreams.infra.scheduler.kernels import wide
from flashdreams.rollout.losses import Loss


def diffusion_nft(
    velocity: Tensor,
    old_velocity: Tensor,
    clean: Tensor,
    noisy: Tensor,
    sigma: float | Tensor,
    advantages: Tensor,
    *,
    beta: float = 1.0,
    advantage_limit: float = 5.0,
    normalise: bool = True,
    mask: Tensor | None = None,
) -> Loss:
    """One noise level of the DiffusionNFT objective (https://arxiv.org/abs/2509.16117).

    The policy is mixed with the old one into a positive flow ``beta v + (1 - beta) v_old`` and its mirror image about
    ``v_old``, the negative one. With ``r = clip(A, -limit, limit) / (2 limit) + 1/2``, the positive one shall lead to
    the clean sample by the part ``r``, the negative one by the rest.

    Args:
        velocity: ``[B, ...]``, of the policy at ``noisy``, with a gradient.
        old_velocity: of the policy that sampled, or its moving average.
        clean: what was sampled.
        noisy: ``(1 - sigma) * clean + sigma * noise``.
        sigma: one level, or ``[B]``.
        advantages: ``[B]``.
        normalise: divide each error by its own mean size (at least 1e-5), so that all samples pull alike.
        mask: bool, broadcastable to ``clean``: what was generated. The mean over samples is weighted by it, so that
            each element counts once.

    Raises:
        ValueError: shapes do not fit, a value is not finite, or ``beta`` or ``advantage_limit`` is not above 0.
    """
    for name, value in (("beta", beta), ("advantage_limit", advantage_limit)):
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} is {value}; expected a finite number above 0")
    _check(clean, {"velocity": velocity, "old_velocity": old_velocity, "noisy": noisy}, advantages, mask)
    dtype, result = wide(clean), torch.promote_types(velocity.dtype, torch.float32)
    velocity, old, noisy, clean = (x.to(dtype) for x in (velocity, old_velocity.detach(), noisy, clean))
    advantages = advantages.detach().to(clean)
    level = torch.as_tensor(sigma).to(clean).reshape(-1, *[1] * (clean.ndim - 1))
    active = torch.ones_like(clean, dtype=torch.bool) if mask is None else mask.expand(clean.shape)
    count = active.flatten(1).sum(1)

    def error(flow: Tensor) -> Tensor:
        """Of the clean estimate along ``flow``, ``[B]``."""
        gap = torch.where(active, noisy - level * flow - clean, 0).flatten(1)
        size = (gap.detach().abs().sum(1) / count).clamp(min=1e-5) if normalise else 1.0
        return gap.square().sum(1) / count / size

    mixed = beta * velocity + (1 - beta) * old
    positive, negative = error(mixed), error(2 * old - mixed)
    share = advantages.clamp(-advantage_limit, advantage_limit) / (2 * advantage_limit) + 0.5
    each = advantage_limit * (share * positive + (1 - share) * negative) / beta
    value = (each * count).sum() / count.sum()
    if not bool(value.isfinite()):
        raise ValueError("the loss is not finite; velocity, noisy, clean or advantages have values that are not")
    moved = torch.where(active, velocity.detach() - old, 0).square()
    return Loss(
        value.to(result),
        {
            "positive_error": positive.mean().item(),
            "negative_error": negative.mean().item(),
            "positive_share": share.mean().item(),
            "clip_fraction": (advantages.abs() > advantage_limit).to(clean).mean().item(),
            "velocity_change": (moved.sum() / count.sum()).sqrt().item(),
        },
    )


def _check(clean: Tensor, likewise: dict[str, Tensor], advantages: Tensor, mask: Tensor | None) -> None:
    for name, value in likewise.items():
        if value.shape != clean.shape:
            raise ValueError(f"{name} has shape {list(value.shape)}; expected that of clean, {list(clean.shape)}")
    if advantages.shape != clean.shape[:1]:
        raise ValueError(f"advantages have shape {list(advantages.shape)}; expected [{len(clean)}], one per sample")
    if mask is not None and (mask.dtype != torch.bool or not bool(mask.expand(clean.shape).flatten(1).any(1).all())):
        raise ValueError("mask is not bool, or leaves a sample without active elements; leave such samples out")
