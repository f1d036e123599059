"""Sigma tables: pure functions of a step count and a shift, computed in float64."""

from __future__ import annotations

import numpy as np


def shifted(u: float, shift: float) -> float:
    """``shift * u / (1 + (shift - 1) * u)``: moves a level towards noise for ``shift > 1``."""
    return shift * u / (1 + (shift - 1) * u)


def linear(steps: int, shift: float) -> list[float]:
    """``steps`` shifted levels from 1, and a final 0."""
    return [shifted(1 - i / steps, shift) for i in range(steps)] + [0.0]


def native_unipc(steps: int, shift: float) -> list[float]:
    """Wan's FlowUniPCMultistepScheduler: from 0.999 (as float32) down, shifted, and a final 0."""
    levels = np.linspace(float(np.float32(0.999)), 0, steps + 1)[:-1].tolist()
    return [shifted(u, shift) for u in levels] + [0.0]


def native_dpmpp(steps: int, shift: float) -> list[float]:
    """Wan's FlowDPMSolverMultistepScheduler: the levels of :func:`linear`, summed up in its own order."""
    return [shifted(u, shift) for u in np.linspace(1, 0, steps + 1)[:-1].tolist()] + [0.0]


def diffusers_unipc(steps: int, shift: float) -> list[float]:
    """diffusers' UniPCMultistepScheduler with flow sigmas: towards 1/1000, shifted, kept below 1, and a final 0."""
    levels = [shifted(u, shift) for u in np.linspace(1, 1 / 1000, steps + 1)[:-1].tolist()]
    first = levels[0] - 1e-6 if abs(levels[0] - 1) < 1e-6 else levels[0]
    return [first, *levels[1:], 0.0]


def diffusers_euler(steps: int, shift: float) -> list[float]:
    """The table of diffusers' FlowMatchEulerDiscreteScheduler, and a final 0."""
    # Its lowest level is a float32 that was rounded after each operation.
    one, unit = np.float32(1), np.float32(0.001)
    lowest = float(np.float32(shift) * unit / (one + np.float32(shift - 1) * unit))
    levels = [1 - (1 - lowest) * i / (steps - 1) for i in range(steps)] if steps > 1 else [1.0]
    return [shifted(u, shift) for u in levels] + [0.0]


def training(shift: float, steps: int = 1000) -> list[float]:
    """Self-Forcing's training table: ``steps`` shifted levels from 1, falling, without the final 0."""
    return linear(steps, shift)[:-1]


def warped_steps(denoising_steps: tuple[int, ...], shift: float) -> list[float]:
    """Timesteps of ``denoising_steps`` taken as indices into the training table (step 0 is timestep 0)."""
    table = [*training(shift), 0.0]
    return [1000 * table[1000 - step] for step in denoising_steps]


def nearest(timestep: float, shift: float) -> float:
    """Sigma of the training-table entry whose timestep is nearest; the higher one of two equally near."""
    return min(training(shift), key=lambda sigma: abs(1000 * sigma - timestep))
