"""diffusers' FlowMatchEulerDiscreteScheduler: tables, and trajectories of a closed-form model."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from flashdreams.infra.scheduler import FlowMatchEulerSchedulerConfig
from flashdreams.infra.scheduler.samplers import Scheduler
from golden import Golden


def matches(golden: Golden) -> bool:
    return golden.config.get("solver") == "sched_diffusers_flow_euler"


def run(golden: Golden) -> Iterator[tuple[str, Tensor]]:
    for steps in golden.config["steps"]:
        for shift in golden.config["shifts"]:
            scheduler = FlowMatchEulerSchedulerConfig(num_steps=steps, shift=shift, table="diffusers").setup()
            case = f"N{steps}_shift{shift}"
            yield f"{case}.sigmas", scheduler.sigmas(steps)
            yield f"{case}.timesteps", scheduler.timesteps(steps)
            yield f"{case}.trajectory", trajectory(scheduler, golden.inputs["x"], golden.inputs["p"])


def trajectory(scheduler: Scheduler, x: Tensor, p: Tensor) -> Tensor:
    """``x`` and the sample after each step, stacked; ``p`` is the "prompt" of the model."""
    samples, state = [x], scheduler.begin()
    for step in scheduler.steps:
        x = scheduler.transition(x, flow(x, step.timestep, p), step, no_draw, state)
        samples.append(x)
    return torch.stack(samples)


def flow(x: Tensor, timestep: float, p: Tensor) -> Tensor:
    """The closed-form model of the scheduler files (see their ``notes``)."""
    return 0.5 * x - 0.4 * torch.tanh(1.5 * x + p) + (timestep / 1000) * 0.3 * p


def no_draw() -> Tensor:
    raise AssertionError("Euler's step is deterministic")
