"""Configs of post-processors, and of slugs that are one. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, ClassVar

from flashdreams.config import ConfigError, InstantiateConfig
from flashdreams.infra.config import PipelineConfig, RunnerConfig

if TYPE_CHECKING:
    from flashdreams.infra.postprocess.contract import Postprocessor

MAX_SCALE = 16


@dataclass(frozen=True, kw_only=True)
class PostprocessorConfig(InstantiateConfig["Postprocessor"]):
    """Frames in, frames out. Size, rate and number of what comes out are known before anything is loaded."""

    name: str
    """What ``--postprocess`` calls it."""
    description: str

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of what comes out."""
        return height, width

    def output_fps(self, fps: Fraction) -> Fraction:
        """Frame rate of what comes out. With :meth:`output_frames` it keeps the length in seconds."""
        return fps

    def output_frames(self, frames: int) -> int:
        """How many frames come out in all when ``frames`` have gone in; 0 for 0, and it never falls."""
        return frames


@dataclass(frozen=True, kw_only=True)
class ChainConfig(PostprocessorConfig):
    """Several, each working on what the one before it made; none at all leaves frames as they are."""

    _target: ClassVar[str] = "flashdreams.infra.postprocess.chain:Chain"
    name: str = "chain"
    description: str = "One after another"
    stages: tuple[PostprocessorConfig, ...] = ()

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        for stage in self.stages:
            height, width = stage.output_size(height, width)
        return height, width

    def output_fps(self, fps: Fraction) -> Fraction:
        for stage in self.stages:
            fps = stage.output_fps(fps)
        return fps

    def output_frames(self, frames: int) -> int:
        for stage in self.stages:
            frames = stage.output_frames(frames)
        return frames


UNCHANGED = ChainConfig()
"""Frames as they come."""


@dataclass(frozen=True, kw_only=True)
class PipelinePostprocessorConfig(PostprocessorConfig):
    """A streaming model whose controls are the frames of a video, and which makes that video ``scale`` times as large.

    One frame out for each frame in. The model's encoder gets the frames as they are and scales them itself.
    """

    _target: ClassVar[str] = "flashdreams.infra.postprocess.pipeline:PipelinePostprocessor"
    pipeline: PipelineConfig
    scale: int = 4
    prompt: str = ""
    """What the model is told beside the frames."""

    def validate(self) -> None:
        check_video_model(self.pipeline, self.scale)

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        return height * self.scale, width * self.scale


@dataclass(frozen=True, kw_only=True)
class VideoRunnerConfig(RunnerConfig):
    """A slug that works on a video file (``--video FILE``), of any size and length, through a streaming model."""

    _target: ClassVar[str] = "flashdreams.infra.postprocess.video_runner:VideoRunner"
    scale: int = 4
    """How many times as large as the file the video becomes. The model is made for one value."""

    def validate(self) -> None:
        super().validate()
        check_video_model(self.pipeline, self.scale)


def check_video_model(pipeline: PipelineConfig, scale: int) -> None:
    """Raise :class:`ConfigError` unless ``pipeline`` can work through a video of any length."""
    if not 1 <= scale <= MAX_SCALE:
        raise ConfigError(f"scale is {scale}; expected 1 to {MAX_SCALE}")
    if pipeline.encoder is None or pipeline.decoder is None:
        missing = "encoder" if pipeline.encoder is None else "decoder"
        raise ConfigError(f"{pipeline.name} has no {missing}; a model that works on a video needs both")
    if (own := getattr(pipeline.encoder, "scale", scale)) != scale:
        raise ConfigError(f"{pipeline.name}: scale is {scale}, but its encoder's is {own}; set both to one number")
    if not pipeline.encoder.takes.frame:
        raise ConfigError(f"{pipeline.name} has an encoder that takes no video frames; its controls must be frames")
    if pipeline.diffusion_model.transformer.bidirectional:
        raise ConfigError(f"{pipeline.name} makes a whole clip as one chunk; a video is worked through as a stream")
