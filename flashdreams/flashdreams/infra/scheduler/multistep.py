"""Multistep kernels: the next sample from this step's clean estimate and those of the steps before it.

With ``a = 1 - s`` and the log-SNR ``lam = log(1 - s) - log(s)``, both solvers integrate ``clean`` over ``lam``: exactly
if it is constant, to second order if it is not. A chunk's first and last step are of first order, for want of a
history and because ``lam`` is infinite at ``s = 0``. Coefficients are Python floats, from sigmas that may be 1 or 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class SolverState:
    """What a solver remembers of the chunk so far, whichever expert predicted it.

    ``estimates`` are the clean estimates of the last two steps with the sigma of each, oldest first; ``sample`` is the
    corrected sample at the newest of them (UniPC only).
    """

    estimates: list[tuple[float, Tensor]] = field(default_factory=list)
    sample: Tensor | None = None

    def remember(self, sigma: float, estimate: Tensor, sample: Tensor | None = None) -> None:
        """Add the estimate of a step, dropping all but the one before it."""
        self.estimates = [*self.estimates[-1:], (sigma, estimate)]
        self.sample = sample

    def clear(self) -> None:
        """Forget the chunk so far: a step that was not this solver's own has come in between."""
        self.estimates, self.sample = [], None


def log_snr(sigma: float) -> float:
    """``log(1 - sigma) - log(sigma)``; infinite at 0 and 1."""
    if sigma in (0, 1):
        return math.inf if sigma == 0 else -math.inf
    return math.log1p(-sigma) - math.log(sigma)


def unipc_step(x: Tensor, clean: Tensor, sigma: float, sigma_next: float, state: SolverState) -> Tensor:
    """One step of UniPC (Zhao et al. 2023, https://arxiv.org/abs/2302.04867): order 2, ``B(h) = exp(h) - 1``.

    ``clean``, estimated at ``x``, first corrects the step that led to ``x``; it is not estimated again after that.
    """
    if sigma_next == 0:
        return clean
    corrected = _correct(clean, sigma, state) if state.estimates else x
    state.remember(sigma, clean, corrected)
    decay = _decay(sigma, sigma_next)
    y = (sigma_next / sigma) * corrected - (1 - sigma_next) * decay * clean
    if len(state.estimates) == 1:
        return y
    older, previous = state.estimates[-2]
    r = (log_snr(older) - log_snr(sigma)) / (log_snr(sigma_next) - log_snr(sigma))
    return y - (1 - sigma_next) * decay * 0.5 * (previous - clean) / r


def _correct(clean: Tensor, sigma: float, state: SolverState) -> Tensor:
    """The sample at ``sigma``, redone from the one before it now that the clean estimate at ``sigma`` is known."""
    last, previous = state.estimates[-1]
    assert state.sample is not None
    decay = _decay(last, sigma)
    base = (sigma / last) * state.sample - (1 - sigma) * decay * previous
    if len(state.estimates) == 1:
        return base - (1 - sigma) * decay * 0.5 * (clean - previous)
    older, oldest = state.estimates[-2]
    h = log_snr(sigma) - log_snr(last)
    r = (log_snr(older) - log_snr(last)) / h
    g1 = -decay / h - 1
    g2 = -g1 / h - 0.5
    b1, b2 = g1 / decay, 2 * g2 / decay
    rho1 = (b1 - b2) / (1 - r)
    rho2 = b1 - rho1
    return base - (1 - sigma) * decay * (rho1 * (oldest - previous) / r + rho2 * (clean - previous))


def dpmpp_step(x: Tensor, clean: Tensor, sigma: float, sigma_next: float, state: SolverState) -> Tensor:
    """One step of DPM-Solver++(2M) (Lu et al. 2022, https://arxiv.org/abs/2211.01095), midpoint."""
    if sigma_next == 0:
        return clean
    state.remember(sigma, clean)
    y = (sigma_next / sigma) * x - (1 - sigma_next) * _decay(sigma, sigma_next) * clean
    if len(state.estimates) == 1:
        return y
    older, previous = state.estimates[-2]
    # 0 after a step from sigma 1, where log-SNR is infinite: nothing is known yet of how the estimate changes with it.
    ratio = (log_snr(sigma_next) - log_snr(sigma)) / (log_snr(sigma) - log_snr(older))
    return y - (1 - sigma_next) * _decay(sigma, sigma_next) * 0.5 * ratio * (clean - previous)


def _decay(sigma: float, sigma_next: float) -> float:
    """``exp(-h) - 1`` over the step ``h`` of log-SNR; negative, -1 from sigma 1."""
    return math.expm1(log_snr(sigma) - log_snr(sigma_next))
