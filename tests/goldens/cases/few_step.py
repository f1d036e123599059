"""Self-Forcing's scheduler: training table, warped steps, re-noising, clean estimates, Euler steps."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from cases.flow_euler import trajectory
from flashdreams.infra.scheduler import FlowMatchEulerSchedulerConfig
from flashdreams.infra.scheduler.kernels import EULER, add_noise, clean_estimate
from flashdreams.infra.scheduler.tables import nearest, training, warped_steps
from golden import Golden


def matches(golden: Golden) -> bool:
    return "Self-Forcing" in golden.repository and golden.files == ("utils/scheduler.py",)


def run(golden: Golden) -> Iterator[tuple[str, Tensor]]:
    config, inputs = golden.config, golden.inputs
    shift, steps = config["shift"], tuple(config["denoising_steps"])
    sigmas, warped = training(shift), warped_steps(steps, shift)
    yield "sigmas", torch.tensor(sigmas)
    yield "timesteps", 1000 * torch.tensor(sigmas)
    yield "warped_steps", torch.tensor(warped)
    yield "training_weights", training_weights(1000 * torch.tensor(sigmas, dtype=torch.float64))

    frames = range(len(inputs["x0"]) // len(steps))  # rows of the inputs that share a denoising step
    levels = [nearest(timestep, shift) for timestep in warped for _ in frames]
    neighbours = [[*sigmas, 0.0][sigmas.index(level) + 1] for level in levels]
    if 0.0 in neighbours:
        neighbours = [0.0] * len(neighbours)  # the original takes the whole batch to 0 if one row gets there
    unwarped = [nearest(step, shift) for step in steps for _ in frames]
    yield "warped_ids", torch.tensor([sigmas.index(level) for level in levels])
    yield "add_noise_warped", by_row(add_noise, inputs["x0"], inputs["noise"], levels)
    yield "add_noise_unwarped", by_row(add_noise, inputs["x0"], inputs["noise"], unwarped)
    yield "x0_from_flow_warped", by_row(clean_estimate, inputs["xt"], inputs["v"], levels)
    rows = zip(inputs["xt"], inputs["v"], levels, neighbours, strict=True)
    yield "step_at_warped", torch.stack([EULER.mean(*row) for row in rows])

    euler = FlowMatchEulerSchedulerConfig(num_steps=8, shift=shift).setup()
    yield "euler8.sigmas", euler.sigmas(8)[:-1]
    yield "euler8.timesteps", euler.timesteps(8)
    yield "euler8.trajectory", trajectory(euler, inputs["xt"][:1], inputs["p"])


def training_weights(timesteps: Tensor) -> Tensor:
    """Loss weight of each entry of the training table: a bell around its middle, lowered to 0 and scaled to mean 1."""
    bell = torch.exp(-2 * ((timesteps - 500) / 1000) ** 2)
    bell = bell - bell.min()
    return bell / bell.mean()


def by_row(function, first: Tensor, second: Tensor, levels: list[float]) -> Tensor:
    return torch.stack([function(*row) for row in zip(first, second, levels, strict=True)])
