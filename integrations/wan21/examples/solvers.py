"""Wan2.1 with its other solvers, as slugs of your own.

export FLASHDREAMS_RUNNER_CONFIGS="wan21-dpmpp=solvers:RUNNER_DPMPP,wan21-euler=solvers:RUNNER_EULER"
PYTHONPATH=integrations/wan21/examples flashdreams-run wan21-dpmpp --prompt "..."
"""

from __future__ import annotations

from flashdreams.config import derive_config
from flashdreams.infra.scheduler.config import DPMPPSchedulerConfig, FlowMatchEulerSchedulerConfig
from wan21.config import RUNNER_WAN21_T2V_1_3B

RUNNER_DPMPP = derive_config(
    RUNNER_WAN21_T2V_1_3B,
    runner_name="wan21-dpmpp",
    description="Wan2.1 1.3B with DPM++(2M) (licence: Apache-2.0)",
    pipeline={
        "name": "wan21-dpmpp",
        "diffusion_model": {"scheduler": DPMPPSchedulerConfig(num_steps=50, shift=5.0)},
    },
)
"""The original's ``--sample_solver dpm++``."""

RUNNER_EULER = derive_config(
    RUNNER_WAN21_T2V_1_3B,
    runner_name="wan21-euler",
    description="Wan2.1 1.3B with the Euler steps of diffusers (licence: Apache-2.0)",
    pipeline={
        "name": "wan21-euler",
        "diffusion_model": {"scheduler": FlowMatchEulerSchedulerConfig(num_steps=50, shift=5.0, table="diffusers")},
    },
)
