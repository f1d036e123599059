"""The frames to make larger -> what the network, the decoder and the colour correction are given of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from flashdreams.core.controls import Control
from flashdreams.infra.encoder import StreamingEncoder
from flashdreams.infra.layout import Layout
from flashvsr._projection import LowQualityProjection, ProjectionCache
from flashvsr.config import LowQualityEncoderConfig


@dataclass(frozen=True)
class LowQuality:
    """A chunk's ``input``: tokens ``[B, T, rows * columns, dim]``, one row per latent frame, and the chunk's own frames
    at the size of the output, uint8 ``[B, 3, F, H, W]``."""

    tokens: Tensor
    frames: Tensor


@dataclass
class LowQualityCache:
    """One stream: pixels of the output, the last frame there was, and what the projection remembers."""

    height: int
    width: int
    last: list[Tensor | None]
    """Of each sample, uint8 ``[h, w, 3]``."""
    projection: ProjectionCache = field(default_factory=ProjectionCache)
    begun: bool = False


class LowQualityEncoder(StreamingEncoder):
    """Scales the frames and projects them. The tokens of a latent frame come from the four frames after its own."""

    config: LowQualityEncoderConfig

    def __init__(self, config: LowQualityEncoderConfig) -> None:
        super().__init__(config)
        self.projection = LowQualityProjection(config)

    @property
    def checkpoint_root(self) -> LowQualityProjection:
        """A checkpoint holds the projection's own keys."""
        return self.projection

    def initialize_cache(self, layout: Layout) -> LowQualityCache:
        return LowQualityCache(8 * layout.height, 8 * layout.width, [None] * layout.batch)

    def encode(
        self, controls: Sequence[Sequence[Control | None]], start: int, stop: int, cache: LowQualityCache
    ) -> LowQuality:
        """The chunk's tokens and frames; where the video has ended, its last frame goes on.

        Raises:
            ValueError: there is no frame at all yet, or one has another size than the rollout's by ``scale``.
        """
        rows = [self._filled(row, sample, cache) for sample, row in enumerate(controls)]
        frames = torch.stack([self._scaled(torch.stack(row), cache) for row in rows])
        own, ahead = frames.shape[2] - self.config.lookahead, self.config.lookahead
        seen = frames[:, :, ahead:]
        if not cache.begun:
            self.projection.begin(self._to_video(frames[:, :, :1]), cache.projection)
            seen, cache.begun = frames[:, :, 1:], True
        tokens = self.projection(self._to_video(seen), cache.projection)
        return LowQuality(tokens, frames[:, :, :own].clone())  # a copy, so that what lies ahead is not kept with it

    def _filled(self, row: Sequence[Control | None], sample: int, cache: LowQualityCache) -> list[Tensor]:
        """The row's frames, those that are missing taken from the one before."""
        frames = []
        for control in row:
            if control is not None and control.frame is not None:
                frame = torch.from_numpy(np.array(control.frame.pixels))
                scale = self.config.scale
                if tuple(frame.shape) != (cache.height // scale, cache.width // scale, 3):
                    raise ValueError(
                        f"a frame is {frame.shape[0]}x{frame.shape[1]} (height x width); this rollout is "
                        f"{cache.height}x{cache.width}, so that it takes frames of "
                        f"{cache.height // scale}x{cache.width // scale}, a {scale}th"
                    )
                cache.last[sample] = frame
            last = cache.last[sample]
            if last is None:
                raise ValueError("this model makes a video larger and was given no frame of one (control=)")
            frames.append(last)
        return frames

    def _scaled(self, frames: Tensor, cache: LowQualityCache) -> Tensor:
        """uint8 ``[F, h, w, 3] -> [3, F, H, W]``."""
        pixels = frames.to(self.projection.conv1.weight.device).permute(0, 3, 1, 2)
        scaled = [enlarge(piece, cache.height, cache.width) for piece in pixels.split(4)]
        return torch.cat(scaled).transpose(0, 1)

    def _to_video(self, frames: Tensor) -> Tensor:
        return to_video(frames, self.projection.conv1.weight.dtype)


def to_video(frames: Tensor, dtype: torch.dtype) -> Tensor:
    """Levels 0 to 255 -> [-1, 1], computed in at least float32."""
    wide = torch.promote_types(dtype, torch.float32)
    return (frames.to(wide) / 255 * 2 - 1).to(dtype)


def enlarge(frames: Tensor, height: int, width: int) -> Tensor:
    """uint8 ``[F, 3, h, w] -> [F, 3, height, width]``, bicubic, as PIL does it: across and then down, each rounded to
    whole levels (a half upwards) and cut off at 0 and 255, which beside hard edges makes tens of levels."""
    pixels = frames.float()
    for size in ((frames.shape[-2], width), (height, width)):
        pixels = (F.interpolate(pixels, size, mode="bicubic", antialias=True) + 0.5).floor().clamp(0, 255)
    return pixels.to(torch.uint8)
