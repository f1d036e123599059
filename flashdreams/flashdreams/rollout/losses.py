"""Policy-gradient losses on replayed log-probabilities: pure functions, each with what is worth watching.

A log-probability here is a *mean* over the elements of a sample, so that a ratio is the D-th root of the true one for D
elements: that is why clip ranges near 1e-4 work, and 0.2 would never clip. Entries are ``[B, S]``, one per sample and
scored (chunk, step); the product over them is never formed.

MixGRPO is :func:`flow_grpo` on a plan whose stochastic steps, of kernel ``flow_sde``, are a moving
:class:`~flashdreams.rollout.schedules.Window`; DanceGRPO is :func:`flow_grpo` on kernel ``dance_sde``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Loss:
    """``value`` is a scalar to go ``backward`` from; ``metrics`` are plain numbers, by name."""

    value: Tensor
    metrics: dict[str, float]


def flow_grpo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip: float = 1e-4,
    weights: Tensor | None = None,
    kl: Tensor | None = None,
    kl_coefficient: float = 0.0,
) -> Loss:
    """Clipped policy gradient (Flow-GRPO, https://arxiv.org/abs/2505.05470): ``max(-A r, -A clip(r, 1 - c, 1 + c))``.

    Args:
        log_probs: ``[B, S]``, with a gradient.
        old_log_probs: ``[B, S]``, of the policy that sampled.
        advantages: ``[B]``, or ``[B, S]``.
        clip: see :func:`clip_range`.
        weights: ``[B, S]``, from 0: how much an entry counts in means, such as its number of active elements; by
            default equally. Entries of weight 0 may hold anything.
        kl: ``[B, S]``, divergence from a reference by :func:`gaussian_kl`, with a gradient.

    Raises:
        ValueError: shapes do not fit, values are not finite or out of range, or all weights are 0.
    """
    entries = _Entries(log_probs, old_log_probs, advantages, weights)
    return _clipped(entries, entries.change, clip, kl, kl_coefficient)


def grpo_guard(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    kl_to_old: Tensor,
    stds: Tensor,
    *,
    clip: float = 1e-4,
    weights: Tensor | None = None,
    kl: Tensor | None = None,
    kl_coefficient: float = 0.0,
) -> Loss:
    """:func:`flow_grpo` on ratios that are centred on 1 and equally wide at every noise level, so that clipping works
    on both sides (GRPO-Guard, https://arxiv.org/abs/2510.22319): ``log r = std * (change of log-probability + KL)``.

    Args:
        kl_to_old: ``[B, S]``, :func:`gaussian_kl` of the mean to the old one, with a gradient.
        stds: of the transitions, ``[S]`` or ``[B, S]``, above 0.
    """
    entries = _Entries(log_probs, old_log_probs, advantages, weights)
    stds = torch.as_tensor(stds).to(log_probs).expand_as(log_probs)
    if bool((stds <= 0).any()):
        raise ValueError("a std is not above 0; deterministic steps have no log-probability, leave them out")
    normalised = stds * (entries.change + entries.of(kl_to_old, "kl_to_old"))
    return _clipped(entries, normalised, clip, kl, kl_coefficient)


def flow_dppo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    kl_to_old: Tensor,
    *,
    threshold: float = 1e-5,
    weights: Tensor | None = None,
) -> Loss:
    """``-A r``, without entries that have gone ``threshold`` of divergence from the old policy and would go further.

    Args:
        kl_to_old: ``[B, S]``, :func:`gaussian_kl` of the mean to the old one. It only decides; it gets no gradient.
    """
    entries = _Entries(log_probs, old_log_probs, advantages, weights)
    if not threshold > 0:
        raise ValueError(f"threshold is {threshold}; expected a divergence above 0, such as 1e-5")
    onwards = entries.change.detach() * entries.advantages > 0
    dropped = (entries.of(kl_to_old, "kl_to_old").detach() >= threshold) & onwards
    # Selected before exp, so that a ratio that overflows leaves no NaN in the gradient of a dropped entry.
    kept = torch.where(dropped, 0, entries.change).exp()
    value = entries.mean(torch.where(dropped, 0, -entries.advantages * kept))
    return _finite(value, {**entries.metrics(entries.change), "clip_fraction": entries.share(dropped)})


def gaussian_kl(mean: Tensor, other: Tensor, std: float | Tensor, mask: Tensor | None = None) -> Tensor:
    """Divergence of two transitions of one standard deviation, ``(mean - other)**2 / (2 std**2)``, ``[B]``.

    Args:
        mean: ``[B, ...]``, as is ``other``.
        std: one, or one per sample ``[B]``.
        mask: bool, broadcastable to ``mean``: the elements over which the mean is taken.
    """
    squares = (mean - other).square()
    if mask is None:
        gap = squares.flatten(1).mean(1)
    else:
        active = mask.expand(squares.shape)
        gap = torch.where(active, squares, 0).flatten(1).sum(1) / active.flatten(1).sum(1)
    return gap / (2 * std * std)


def clip_range(clip: float, progress: float, schedule: Literal["constant", "linear", "cosine"] = "constant") -> float:
    """The clip range after ``progress`` (0 to 1) of the training: halved at its end if ``linear``, 0 if ``cosine``."""
    if not 0 <= progress <= 1:
        raise ValueError(f"progress is {progress}; expected 0 to 1")
    factors = {"constant": 1.0, "linear": 1 - progress / 2, "cosine": 0.5 * (1 + math.cos(math.pi * progress))}
    if schedule not in factors:
        raise ValueError(f"schedule is {schedule!r}; expected one of {', '.join(factors)}")
    return clip * factors[schedule]


class _Entries:
    """Checked log-probabilities and advantages, all ``[B, S]``, and means over them."""

    def __init__(self, log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, weights: Tensor | None) -> None:
        if log_probs.ndim != 2 or not log_probs.numel():
            raise ValueError(f"log_probs have shape {list(log_probs.shape)}; expected [B, S], one per sample and step")
        self.shape = log_probs.shape
        self.weights = torch.ones_like(log_probs) if weights is None else self._fitting(weights, "weights")
        self.weights = self.weights.detach().to(log_probs)
        if not bool((self.weights.isfinite() & (self.weights >= 0)).all()) or not bool(self.weights.any()):
            raise ValueError("weights are negative, not finite, or all 0; expected 0 or more, such as active elements")
        advantages = advantages[:, None].expand(self.shape) if advantages.shape == self.shape[:1] else advantages
        self.advantages = self.of(advantages, "advantages").detach()
        self.change = self.of(log_probs, "log_probs") - self.of(old_log_probs, "old_log_probs").detach()

    def of(self, values: Tensor, name: str) -> Tensor:
        """``values`` in the entries' dtype, 0 where an entry does not count."""
        counted = torch.where(self.weights > 0, self._fitting(values, name).to(self.weights), 0)
        if not bool(counted.isfinite().all()):
            where = (~counted.isfinite()).nonzero()[0].tolist()
            raise ValueError(
                f"{name} are not finite at {where} [sample, entry]; mask what has none, or look for its cause"
            )
        return counted

    def mean(self, values: Tensor) -> Tensor:
        return (self.weights * values).sum() / self.weights.sum()

    def share(self, where: Tensor) -> float:
        return float(self.mean(where.to(self.weights)))

    def metrics(self, log_ratio: Tensor) -> dict[str, float]:
        """Of the ratios, and of how far log-probabilities have gone since the sampling, over the entries that count."""
        counted = self.weights > 0
        ratio, change = log_ratio.detach().exp(), self.change.detach()
        mean = self.mean(ratio)
        return {
            "ratio_mean": float(mean),
            "ratio_std": float(self.mean((ratio - mean).square()).sqrt()),
            "ratio_min": float(ratio[counted].min()),
            "ratio_max": float(ratio[counted].max()),
            "approx_kl": float(self.mean(change.square() / 2)),
            "log_prob_change_mean": float(self.mean(change.abs())),
            "log_prob_change_max": float(change[counted].abs().max()),
        }

    def _fitting(self, values: Tensor, name: str) -> Tensor:
        if values.shape != self.shape:
            raise ValueError(f"{name} have shape {list(values.shape)}; expected {list(self.shape)}, as log_probs")
        return values


def _clipped(entries: _Entries, log_ratio: Tensor, clip: float, kl: Tensor | None, kl_coefficient: float) -> Loss:
    if not clip > 0:
        raise ValueError(f"clip is {clip}; expected a range above 0, such as 1e-4")
    if kl_coefficient < 0 or (kl_coefficient > 0) != (kl is not None):
        raise ValueError(f"kl_coefficient is {kl_coefficient}; expected one above 0 together with kl, or neither")
    ratio, a = log_ratio.exp(), entries.advantages
    value = entries.mean(torch.maximum(-a * ratio, -a * ratio.clamp(1 - clip, 1 + clip)))
    metrics = entries.metrics(log_ratio)
    metrics["clip_fraction"] = entries.share((ratio.detach() - 1).abs() > clip)
    if kl is not None:
        divergence = entries.mean(entries.of(kl, "kl"))
        metrics["kl"] = divergence.item()
        value = value + kl_coefficient * divergence
    return _finite(value, metrics)


def _finite(value: Tensor, metrics: dict[str, float]) -> Loss:
    if not bool(value.isfinite()):
        raise ValueError(
            f"the loss is {value.item()}, with ratios up to {metrics['ratio_max']:.3g}: the policy has gone too far "
            "from the one that sampled; use a lower learning rate or fewer updates"
        )
    return Loss(value, metrics)
