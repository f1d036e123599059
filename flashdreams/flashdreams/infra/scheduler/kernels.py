"""The transition kernel: from a sample at ``sigma`` and the predicted flow to a sample at ``sigma_next``.

Flow convention ``x_s = (1 - s) * clean + s * noise`` and ``flow = noise - clean``. The kernel is coefficient-preserving
sampling: a Gaussian around ``(1 - s') * clean + sqrt(s'^2 - std^2) * noise`` with ``std = s' * sin(eta * pi / 2)``.
``eta = 0`` is Euler's step, ``eta = 1`` predicts the clean latent and noises it afresh, as few-step models do.
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
