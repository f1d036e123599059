"""UniPC and DPM-Solver++ on their published tables: sigmas, whole timesteps, trajectories of a closed-form model."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from cases.flow_euler import trajectory
from flashdreams.infra.scheduler import DPMPPSchedulerConfig, UniPCSchedulerConfig
from golden import Golden

SOLVERS = {
    "sched_native_unipc": lambda steps, shift: UniPCSchedulerConfig(num_steps=steps, shift=shift),
    "sched_native_dpmpp": lambda steps, shift: DPMPPSchedulerConfig(num_steps=steps, shift=shift),
    "sched_diffusers_unipc_flow": lambda steps, shift: UniPCSchedulerConfig(
        num_steps=steps, shift=shift, table="diffusers"
    ),
}


def matches(golden: Golden) -> bool:
    return golden.config.get("solver") in SOLVERS


def run(golden: Golden) -> Iterator[tuple[str, Tensor]]:
    for steps in golden.config["steps"]:
        for shift in golden.config["shifts"]:
            scheduler = SOLVERS[golden.config["solver"]](steps, shift).setup()
            case = f"N{steps}_shift{shift}"
            yield f"{case}.sigmas", scheduler.sigmas(steps)
            yield f"{case}.timesteps", scheduler.timesteps(steps).long()
            yield f"{case}.trajectory", trajectory(scheduler, golden.inputs["x"], golden.inputs["p"])
