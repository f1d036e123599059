"""Static configs of the built-in post-processors (torch-free)."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Literal

from flashdreams.config import ConfigError
from flashdreams.infra.postprocess import PostprocessorConfig

FLASHDREAMS_API = 1


@dataclass(frozen=True, kw_only=True)
class ResizeConfig(PostprocessorConfig):
    """Every frame ``scale`` times as large, by a filter."""

    _target: ClassVar[str] = "flashdreams.recipes.filters.modules:Resize"
    scale: int
    kernel: Literal["bicubic", "lanczos"]

    def validate(self) -> None:
        if not 1 <= self.scale <= 16:
            raise ConfigError(f"scale is {self.scale}; expected 1 to 16")

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        return height * self.scale, width * self.scale


@dataclass(frozen=True, kw_only=True)
class BlendConfig(PostprocessorConfig):
    """Twice as many frames: after each, the mean of it and the next (of the last, itself), so that the length stays."""

    _target: ClassVar[str] = "flashdreams.recipes.filters.modules:Blend"

    def output_fps(self, fps: Fraction) -> Fraction:
        return 2 * fps

    def output_frames(self, frames: int) -> int:
        return 2 * frames


POSTPROCESSORS = {
    config.name: config
    for config in (
        BlendConfig(name="blend-x2", description="Twice the frame rate: neighbouring frames are blended"),
        ResizeConfig(name="lanczos-x2", description="Twice the size, by a Lanczos filter", scale=2, kernel="lanczos"),
        ResizeConfig(name="bicubic-x4", description="4 times the size, by a bicubic filter", scale=4, kernel="bicubic"),
    )
}
