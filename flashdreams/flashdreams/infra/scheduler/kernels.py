"""The transition kernel: from a sample at ``sigma`` and the predicted flow to a sample at ``sigma_next``.

Flow convention ``x_s = (1 - s) * clean + s * noise`` and ``flow = noise - clean``. The kernel is coefficient-preserving
sampling: a Gaussian around ``(1 - s') * clean + sqrt(s'^2 - std^2) * noise`` with ``std = s' * sin(eta * pi / 2)``.
``eta = 0`` is Euler's step, ``eta = 1`` predicts the clean latent and noises it afresh, as few-step models do.

Where two experts meet at a boundary ``b``, the one for high noise is trained to lead to the state at ``b``, and its
kernel is the Gaussian that takes a state at ``b`` back up to ``sigma_next``.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def clean_estimate(x: Tensor, flow: Tensor, sigma: float) -> Tensor:
    """``x - sigma * flow``, in float64 where the device has it, returned in ``x``'s dtype."""
    wide = torch.float32 if x.device.type == "mps" else torch.float64
    return (x.to(wide) - sigma * flow.to(wide)).to(x.dtype)


def add_noise(clean: Tensor, noise: Tensor, sigma: float) -> Tensor:
    """``(1 - sigma) * clean + sigma * noise``."""
    return (1 - sigma) * clean + sigma * noise


def transition_std(sigma_next: float, eta: float) -> float:
    """Standard deviation of the kernel."""
    return sigma_next if eta == 1 else sigma_next * math.sin(eta * math.pi / 2)


def transition_mean(x: Tensor, flow: Tensor, sigma: float, sigma_next: float, eta: float) -> Tensor:
    """Mean of the kernel, of ``x``'s shape and dtype."""
    if eta == 0:
        return x + (sigma_next - sigma) * flow
    clean = clean_estimate(x, flow, sigma)
    kept = math.sqrt(max(0.0, sigma_next**2 - transition_std(sigma_next, eta) ** 2))
    mean = (1 - sigma_next) * clean
    return mean + kept * (clean + flow) if kept else mean


def transition(
    x: Tensor, flow: Tensor, sigma: float, sigma_next: float, eta: float, draw: Callable[[], Tensor]
) -> Tensor:
    """Draw the next sample. ``draw`` gives fresh standard noise and is called only where the kernel is stochastic."""
    mean = transition_mean(x, flow, sigma, sigma_next, eta)
    std = transition_std(sigma_next, eta)
    return mean + std * draw().to(mean) if std else mean


def boundary_std(sigma_next: float, boundary: float) -> float:
    """Standard deviation of the noise that takes a state at ``boundary`` up to ``sigma_next``; 0 at or below it."""
    if sigma_next <= boundary:
        return 0.0
    kept = boundary * (1 - sigma_next) / (1 - boundary)
    return math.sqrt(sigma_next**2 - kept**2)


def boundary_mean(x: Tensor, flow: Tensor, sigma: float, sigma_next: float, boundary: float) -> Tensor:
    """Mean of the kernel above the boundary, of ``x``'s shape and dtype: the state at ``boundary``, in proportion."""
    state = clean_estimate(x, flow, sigma - boundary)  # along the flow as far as the boundary instead of to the end
    return state if sigma_next <= boundary else (1 - sigma_next) / (1 - boundary) * state


def boundary_transition(
    x: Tensor, flow: Tensor, sigma: float, sigma_next: float, boundary: float, draw: Callable[[], Tensor]
) -> Tensor:
    """Draw the next sample from one above ``boundary``. The last such step, whose ``sigma_next`` is not above it, hands
    the state at the boundary on as it is, without noise."""
    mean = boundary_mean(x, flow, sigma, sigma_next, boundary)
    std = boundary_std(sigma_next, boundary)
    return mean + std * draw().to(mean) if std else mean
