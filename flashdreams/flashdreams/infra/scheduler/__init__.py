"""Samplers: a sigma table and a transition kernel each. This module names their configs and imports no torch."""

from flashdreams.infra.scheduler.config import (
    BoundaryFewStepSchedulerConfig,
    DPMPPSchedulerConfig,
    FewStepSchedulerConfig,
    FlowMatchEulerSchedulerConfig,
    IndexedFewStepSchedulerConfig,
    UniPCSchedulerConfig,
)

__all__ = [
    "BoundaryFewStepSchedulerConfig",
    "DPMPPSchedulerConfig",
    "FewStepSchedulerConfig",
    "FlowMatchEulerSchedulerConfig",
    "IndexedFewStepSchedulerConfig",
    "UniPCSchedulerConfig",
]
