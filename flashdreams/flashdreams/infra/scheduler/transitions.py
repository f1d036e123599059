"""One step of a sampler, drawn or scored: the kernel that draws the next sample is the one that later scores it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from flashdreams.infra.scheduler.kernels import Kernel, Sigma, levels_of, per_sample, wide
from flashdreams.infra.scheduler.multistep import SolverState

Score = Literal["gaussian", "surrogate"]


@dataclass
class Transition:
    """One step. ``std`` is a float, or ``[B]`` for levels per sample; ``log_prob`` is ``[B]``, the mean over the active
    elements of a sample, and None where the step is deterministic."""

    mean: Tensor
    std: Sigma
    next: Tensor
    log_prob: Tensor | None


def transition(
    kernel: Kernel,
    x: Tensor,
    flow: Tensor,
    sigma: Sigma,
    sigma_next: Sigma,
    *,
    noise: Tensor | None = None,
    next: Tensor | None = None,
    storage_dtype: torch.dtype | None = None,
    score: Score = "gaussian",
    mask: Tensor | None = None,
    state: SolverState | None = None,
) -> Transition:
    """Draw the next sample (``noise``), or score one that was drawn before (``next``): the same computation.

    Args:
        x: ``[B, ...]``, as is ``flow``. The gradient of ``log_prob`` goes through them, into the mean alone.
        noise: standard normal; may be left out where the step is deterministic.
        storage_dtype: what samples are stored in; the next one is rounded to it before it is scored.
        score: ``gaussian`` is the log-density. ``surrogate`` is the published score of CPS, ``-(next - mean)**2``,
            which weighs steps by their variance.
        mask: bool, broadcastable to ``x``; what is False stays as in ``x`` and counts for nothing.
        state: of a multistep kernel, see :meth:`Kernel.mean`.

    Raises:
        ValueError: shapes do not fit, levels do not fall, values are not finite, or a sample has no active element.
    """
    _check_arguments(x, flow, noise, next, mask, score)
    _check_levels(sigma, sigma_next, len(x))
    mean, std = kernel.mean(x, flow, sigma, sigma_next, state), _std(kernel, sigma, sigma_next, x)
    deterministic = not isinstance(std, Tensor) and std == 0
    if mask is not None:
        mean = torch.where(mask, mean, x.to(mean))
    if next is not None:
        next = next.to(mean)
    elif deterministic:
        next = mean
    elif noise is None:
        raise ValueError(f"{kernel} is stochastic from sigma {sigma} to {sigma_next}; give noise, or next to score")
    else:
        drawn = mean + (std.to(mean) if isinstance(std, Tensor) else std) * noise.to(mean)
        next = drawn if mask is None else torch.where(mask, drawn, mean)
    if storage_dtype is not None:
        next = next.to(storage_dtype).to(mean.dtype)
    _check_finite({"x": x, "flow": flow, "mean": mean, "next": next})
    log_prob = None
    if not deterministic:
        values = -((next.detach() - mean).to(wide(mean)) ** 2)
        if score == "gaussian":
            log_std = per_sample(lambda *levels: math.log(kernel.std(*levels)), sigma, sigma_next, x, wide(x))
            values = values / (2 * std * std) - log_std - 0.5 * math.log(2 * math.pi)
        log_prob = _mean_of_active(values, mask).to(mean.dtype)
    return Transition(mean, std.flatten() if isinstance(std, Tensor) else std, next, log_prob)


def _mean_of_active(values: Tensor, mask: Tensor | None) -> Tensor:
    """Mean over all but the first dimension, ``[B]``."""
    if mask is None:
        return values.flatten(1).mean(1)
    active = mask.expand(values.shape)
    return torch.where(active, values, 0).flatten(1).sum(1) / active.flatten(1).sum(1)


def _std(kernel: Kernel, sigma: Sigma, sigma_next: Sigma, x: Tensor) -> Sigma:
    """As :func:`per_sample`; 0 where no sample is drawn at random."""
    levels = levels_of(sigma, sigma_next) or []
    fixed = [i for i, pair in enumerate(levels) if kernel.std(*pair) == 0]
    if fixed and len(fixed) < len(levels):
        raise ValueError(f"the step is deterministic for samples {fixed} and not for the others; take them apart")
    return 0.0 if fixed else per_sample(kernel.std, sigma, sigma_next, x, wide(x))


def _check_levels(sigma: Sigma, sigma_next: Sigma, batch: int) -> None:
    levels = levels_of(sigma, sigma_next)
    if levels is not None and len(levels) not in (1, batch):
        raise ValueError(f"{len(levels)} noise levels were given for {batch} samples; give one, or one for each")
    for high, low in [(sigma, sigma_next)] if levels is None else levels:
        if not 0 <= low < high <= 1:
            raise ValueError(f"a step from sigma {high} to {low} does not lead down within 0 to 1; check the sigmas")


def _check_arguments(
    x: Tensor, flow: Tensor, noise: Tensor | None, next: Tensor | None, mask: Tensor | None, score: str
) -> None:
    if noise is not None and next is not None:
        raise ValueError("both noise and next were given; noise draws the next sample, next scores one drawn before")
    if score not in get_args(Score):
        raise ValueError(f"score is {score!r}; choose one of {', '.join(get_args(Score))}")
    for name, value in {"flow": flow, "noise": noise, "next": next}.items():
        if value is not None and value.shape != x.shape:
            raise ValueError(f"{name} has shape {list(value.shape)}; expected that of x, {list(x.shape)}")
    if mask is None:
        return
    fits = mask.ndim == x.ndim and all(m in (1, n) for m, n in zip(mask.shape, x.shape, strict=True))
    if mask.dtype != torch.bool or not fits:
        raise ValueError(f"mask is {mask.dtype} {list(mask.shape)}; expected bool, broadcastable to {list(x.shape)}")
    if not bool(mask.flatten(1).any(1).all()):
        raise ValueError("a sample has no active element under its mask; leave it out")


def _check_finite(tensors: Mapping[str, Tensor]) -> None:
    if bool(tensors["mean"].isfinite().all()) and bool(tensors["next"].isfinite().all()):
        return
    bad = {name: int((~tensor.isfinite()).sum()) for name, tensor in tensors.items()}
    found = ", ".join(f"{count} in {name}" for name, count in bad.items() if count)
    raise ValueError(f"a step has values that are not finite: {found}; check weights, inputs and storage dtype")
