"""What happens to finished frames on their way to the file. This module names the configs and imports no torch."""

from flashdreams.infra.postprocess.config import (
    UNCHANGED,
    ChainConfig,
    PipelinePostprocessorConfig,
    PostprocessorConfig,
    VideoRunnerConfig,
)

__all__ = [
    "UNCHANGED",
    "ChainConfig",
    "PipelinePostprocessorConfig",
    "PostprocessorConfig",
    "VideoRunnerConfig",
]
