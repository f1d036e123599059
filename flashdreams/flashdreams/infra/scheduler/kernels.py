"""Transition kernels: from a sample at ``sigma`` and the predicted flow to a sample at a lower ``sigma_next``.

Flow convention: ``x = (1 - sigma) * clean + sigma * noise`` and ``flow = noise - clean``. Every kernel but the
multistep ones is a Gaussian around ``(1 - sigma_next) * clean + kept * noise``, both estimated at ``x``, and differs
from the others in ``kept`` and in its standard deviation alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from flashdreams.config import ConfigError
from flashdreams.infra.scheduler.multistep import SolverState, dpmpp_step, unipc_step

Name = Literal["ode", "flow_sde", "dance_sde", "flash_sde", "cps", "boundary", "dpmpp", "unipc"]
Sigma = float | Tensor
"""A noise level, or one per sample ``[B]``."""
Coefficient = Callable[[float, float], float]

NAMES: tuple[str, ...] = get_args(Name)
SOLVERS = {"dpmpp": dpmpp_step, "unipc": unipc_step}


@dataclass(frozen=True)
class Kernel:
    """How a step moves. Fields that a kernel does not name below are of no effect in it.

    - ``ode``: Euler's step.
    - ``flow_sde``: noise scale ``eta * sqrt(sigma / (1 - sigma))``, where ``sigma_cap`` replaces a sigma of 1 below the
      bar (Flow-GRPO, https://arxiv.org/abs/2505.05470).
    - ``dance_sde``: the constant noise scale ``eta`` (DanceGRPO, https://arxiv.org/abs/2505.07818).
    - ``flash_sde``: ``eta`` times a noise scale that rises with sigma, from ``sigma_min`` at 0 to ``sigma_max`` at 1;
      published with the last and the second level of the schedule.
    - ``cps``: coefficient-preserving sampling, of standard deviation ``sigma_next * sin(eta * pi / 2)``
      (https://arxiv.org/abs/2509.05952); with ``eta`` 1 it noises the clean estimate afresh, as few-step models do.
    - ``boundary``: of the expert for high noise, trained to lead to the state at level ``boundary``; that state is
      taken back up to ``sigma_next``, or handed on as it is where that is not above it.
    - ``dpmpp``, ``unipc``: deterministic multistep solvers, which look back over their own steps in a ``SolverState``.
      A step of another kernel in between empties it.

    With ``eta`` 0 each of the first five is Euler's step.
    """

    name: Name
    eta: float = 1.0
    sigma_cap: float = 0.99
    sigma_min: float = 0.0
    sigma_max: float = 1.0
    boundary: float = 0.875

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ConfigError(f"kernel {self.name!r} is not known; choose one of {', '.join(NAMES)}")
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
                raise ConfigError(f"{field.name} of kernel {self.name} is {value!r}; expected a finite number from 0")
        if self.name == "cps" and self.eta > 1:
            raise ConfigError(f"eta of kernel cps is {self.eta}; expected 0 (Euler) to 1 (all noise is fresh)")
        for label in ("sigma_cap", "boundary"):
            if not 0 < getattr(self, label) < 1:
                raise ConfigError(f"{label} is {getattr(self, label)}; expected a noise level between 0 and 1")
        if not self.sigma_min <= self.sigma_max <= 1:
            raise ConfigError(
                f"sigma_min {self.sigma_min} and sigma_max {self.sigma_max} are not in order; expected 0 to 1, rising"
            )

    def to_dict(self) -> dict[str, Any]:
        """As plain data that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Kernel:
        """The kernel of :meth:`to_dict`; ConfigError if a field is missing, unknown or out of range."""
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ConfigError(f"a kernel has no {', '.join(unknown)}; its fields are {', '.join(sorted(known))}")
        if "name" not in values:
            raise ConfigError(f"a kernel needs a name, one of {', '.join(NAMES)}; got {dict(values)}")
        return cls(**values)

    def noise_scale(self, sigma: float) -> float:
        """Diffusion coefficient at ``sigma`` of the kernels that integrate a stochastic differential equation."""
        if self.name == "flow_sde":
            return self.eta * math.sqrt(sigma / (1 - (self.sigma_cap if sigma == 1 else sigma)))
        slope = self.sigma_max - self.sigma_min
        return self.eta * (self.sigma_min + slope * sigma if self.name == "flash_sde" else 1.0)

    def std(self, sigma: float, sigma_next: float) -> float:
        """Standard deviation of the step; 0 where it is deterministic."""
        if self.name in ("ode", *SOLVERS) or (self.eta == 0 and self.name != "boundary"):
            return 0.0
        if self.name == "cps":
            return sigma_next if self.eta == 1 else sigma_next * math.sin(self.eta * math.pi / 2)
        if self.name == "boundary":
            if sigma_next <= self.boundary:
                return 0.0
            return math.sqrt(sigma_next**2 - (self.boundary * (1 - sigma_next) / (1 - self.boundary)) ** 2)
        return self.noise_scale(sigma) * math.sqrt(sigma - sigma_next)

    def kept(self, sigma: float, sigma_next: float) -> float:
        """How much of the noise estimated at ``sigma`` the mean keeps."""
        if self.name == "cps":
            return math.sqrt(max(0.0, sigma_next**2 - self.std(sigma, sigma_next) ** 2))
        return sigma_next + self.noise_scale(sigma) ** 2 * (sigma_next - sigma) / (2 * sigma)

    def mean(
        self, x: Tensor, flow: Tensor, sigma: Sigma, sigma_next: Sigma, state: SolverState | None = None
    ) -> Tensor:
        """Mean of the step, of ``x``'s shape; float32, or float64 if ``x`` or ``flow`` is.

        Args:
            state: history of this chunk, which a multistep kernel needs and adds to, and any other one empties.

        Raises:
            ValueError: a multistep kernel was given no history, or a level per sample.
        """
        dtype = torch.promote_types(torch.promote_types(x.dtype, flow.dtype), torch.float32)
        x, flow = x.to(dtype), flow.to(dtype)
        if self.name in SOLVERS:
            if state is None or isinstance(sigma, Tensor) or isinstance(sigma_next, Tensor):
                raise ValueError(
                    f"{self.name} looks back over a chunk's steps; give it the state of begin(), and floats"
                )
            return SOLVERS[self.name](x, clean_estimate(x, flow, sigma), sigma, sigma_next, state)
        if state is not None:
            state.clear()
        if self.name == "boundary":
            return self._lifted(x, flow, sigma, sigma_next)
        if self.name == "ode" or self.eta == 0:
            return x + per_sample(lambda s, t: t - s, sigma, sigma_next, x) * flow
        clean = clean_estimate(x, flow, per_sample(lambda s, t: s, sigma, sigma_next, x, wide(x)))
        mean = per_sample(lambda s, t: 1 - t, sigma, sigma_next, x) * clean
        if self.name == "cps" and self.eta == 1:
            return mean
        return mean + per_sample(self.kept, sigma, sigma_next, x) * (clean + flow)

    def _lifted(self, x: Tensor, flow: Tensor, sigma: Sigma, sigma_next: Sigma) -> Tensor:
        """The state at the boundary, in proportion: along the flow as far as there instead of to the clean end."""
        b = self.boundary
        state = clean_estimate(x, flow, per_sample(lambda s, t: s - b, sigma, sigma_next, x, wide(x)))
        return per_sample(lambda s, t: 1.0 if t <= b else (1 - t) / (1 - b), sigma, sigma_next, x) * state


EULER = Kernel("ode")
RENOISE = Kernel("cps", eta=1.0)


def wide(x: Tensor) -> torch.dtype:
    """float64 where the device of ``x`` has it."""
    return torch.float32 if x.device.type == "mps" else torch.float64


def clean_estimate(x: Tensor, flow: Tensor, sigma: Sigma) -> Tensor:
    """``x - sigma * flow``, in float64 where the device has it, returned in ``x``'s dtype."""
    return (x.to(wide(x)) - sigma * flow.to(wide(x))).to(x.dtype)


def add_noise(clean: Tensor, noise: Tensor, sigma: float) -> Tensor:
    """``(1 - sigma) * clean + sigma * noise``."""
    return (1 - sigma) * clean + sigma * noise


def levels_of(sigma: Sigma, sigma_next: Sigma) -> list[tuple[float, float]] | None:
    """Both levels of each sample; None if all samples share them."""
    if not isinstance(sigma, Tensor) and not isinstance(sigma_next, Tensor):
        return None
    pair = torch.broadcast_tensors(
        *(torch.as_tensor(level, dtype=torch.float64, device="cpu") for level in (sigma, sigma_next))
    )
    return list(zip(*(levels.reshape(-1).tolist() for levels in pair), strict=True))


def per_sample(
    coefficient: Coefficient, sigma: Sigma, sigma_next: Sigma, x: Tensor, dtype: torch.dtype | None = None
) -> Any:
    """A coefficient of the step: a float, or ``[B, 1, ...]`` against ``x`` where levels are per sample."""
    levels = levels_of(sigma, sigma_next)
    if levels is None:
        return coefficient(sigma, sigma_next)  # ty: ignore[invalid-argument-type]
    # Rounded from float64 once, as PyTorch rounds a float: one level per sample gives the bits of one level alone.
    values = torch.tensor([coefficient(*pair) for pair in levels], dtype=torch.float64)
    return values.to(dtype or x.dtype).to(x.device).view(-1, *[1] * (x.ndim - 1))
