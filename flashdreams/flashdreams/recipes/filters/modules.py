"""The built-in post-processors at work."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from flashdreams.infra.postprocess.contract import Postprocessor
from flashdreams.recipes.filters.config import BlendConfig, ResizeConfig


class Resize(Postprocessor):
    """Its state is the size that comes out, ``(height, width)``."""

    config: ResizeConfig

    def open(self, height: int, width: int, fps: Fraction, seed: int = 0) -> tuple[int, int]:
        return self.config.output_size(height, width)

    def push(self, frames: Tensor, state: tuple[int, int]) -> Tensor:
        kernel = Image.Resampling[self.config.kernel.upper()]
        resized = np.empty((len(frames), *state, 3), np.uint8)
        for i, frame in enumerate(frames.numpy()):
            resized[i] = Image.fromarray(frame).resize(state[::-1], kernel)
        return torch.from_numpy(resized)

    def finish(self, state: tuple[int, int]) -> Tensor:
        return torch.empty(0, *state, 3, dtype=torch.uint8)


@dataclass
class BlendState:
    """The frame whose successor has not come yet, ``[0 or 1, H, W, 3]``."""

    last: Tensor


class Blend(Postprocessor):
    """A frame is handed out with its mean with the next one, once that is there."""

    config: BlendConfig

    def open(self, height: int, width: int, fps: Fraction, seed: int = 0) -> BlendState:
        return BlendState(torch.empty(0, height, width, 3, dtype=torch.uint8))

    def push(self, frames: Tensor, state: BlendState) -> Tensor:
        known = torch.cat([state.last, frames])
        state.last = known[-1:].clone()
        return _blended(known[:-1], known[1:])

    def finish(self, state: BlendState) -> Tensor:
        return _blended(state.last, state.last)


def _blended(frames: Tensor, following: Tensor) -> Tensor:
    """Each frame, then its mean with the following one, rounded half up."""
    means = ((frames.to(torch.int16) + following + 1) // 2).to(torch.uint8)
    return torch.stack([frames, means], dim=1).flatten(0, 1)
