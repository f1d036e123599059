"""A tiny streaming video-to-video model with random weights: x4, chunks of 21 and 8 frames, 4 frames of look-ahead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flashdreams.config import derive_config
from flashdreams.core.controls import ControlSpec
from flashdreams.infra.config import DecoderConfig, EncoderConfig
from flashdreams.infra.postprocess import PipelinePostprocessorConfig, PostprocessorConfig, VideoRunnerConfig
from flashdreams.recipes.filters.config import BlendConfig
from flashdreams.recipes.template.config import PIPELINE_TEMPLATE
from flashdreams.recipes.wan.config import WanNetworkConfig


@dataclass(frozen=True, kw_only=True)
class VideoEncoderConfig(EncoderConfig):
    _target: ClassVar[str] = "video_modules:VideoEncoder"
    lookahead: ClassVar[int] = 4
    scale: int = 4

    @property
    def takes(self) -> ControlSpec:
        return ControlSpec(frame=True)


@dataclass(frozen=True, kw_only=True)
class VideoNetworkConfig(WanNetworkConfig):
    _target: ClassVar[str] = "video_modules:VideoNetwork"


@dataclass(frozen=True, kw_only=True)
class VideoDecoderConfig(DecoderConfig):
    _target: ClassVar[str] = "video_modules:VideoDecoder"


@dataclass(frozen=True, kw_only=True)
class RepeatConfig(PostprocessorConfig):
    """Every pixel ``scale`` x ``scale`` times, without a model."""

    _target: ClassVar[str] = "video_modules:Repeat"
    scale: int = 4
    fail_at: int | None = None
    """Number of the frame at which it breaks."""

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        return height * self.scale, width * self.scale


PIPELINE_VIDEO = derive_config(
    PIPELINE_TEMPLATE,
    name="video-x4",
    encoder=VideoEncoderConfig(),
    decoder=VideoDecoderConfig(),
    diffusion_model=derive_config(
        PIPELINE_TEMPLATE.diffusion_model,
        transformer={
            "network": VideoNetworkConfig(
                dim=24, ffn_dim=48, num_heads=2, num_layers=1, in_dim=3, out_dim=3, text_dim=16, text_len=8, freq_dim=32
            ),
            "state_dict_transform": None, "allow_missing": (), "checkpoint_path": "random:3",
            "len_t": 2, "first_len_t": 6, "window_size_t": 8, "sink_size_t": 0,
        },
        scheduler={"num_steps": 1},
    ),
)  # fmt: skip

RUNNER_VIDEO = VideoRunnerConfig(runner_name="video-x4", description="A random x4 model", pipeline=PIPELINE_VIDEO)
POSTPROCESSORS = {
    "model-x4": PipelinePostprocessorConfig(name="model-x4", description="A random x4 model", pipeline=PIPELINE_VIDEO),
    "repeat-x4": RepeatConfig(name="repeat-x4", description="Every pixel 4 x 4 times"),
    "repeat-x1": RepeatConfig(name="repeat-x1", description="Every pixel once", scale=1),
    "blend": BlendConfig(name="blend", description="Twice the rate"),
    "breaks": RepeatConfig(name="breaks", description="Fails at its tenth frame", scale=1, fail_at=9),
}
RUNNERS_VARIABLE = "video-x4=video_model:RUNNER_VIDEO,template=flashdreams.recipes.template.config:RUNNER_TEMPLATE"
POSTPROCESSORS_VARIABLE = ",".join(f"{name}=video_model:POSTPROCESSORS" for name in POSTPROCESSORS)
