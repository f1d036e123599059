"""Contract of post-processors: frames of a video in, frames of a video out, as they come."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from flashdreams.infra.postprocess.config import PostprocessorConfig


class Postprocessor(nn.Module):
    """Holds weights and config only. What belongs to one video is the state that :meth:`open` returns.

    Frames are uint8 RGB ``[T, H, W, 3]`` on the CPU, ``T`` from 0 on. How a video is cut into pushes changes nothing:
    the frames that come out, one after another, are the same to the bit.
    """

    def __init__(self, config: PostprocessorConfig, device: str = "cpu") -> None:
        super().__init__()
        self.config = config
        self.device = torch.device(device)

    def open(self, height: int, width: int, fps: Fraction, seed: int = 0) -> Any:
        """State of one video, of frames of this size.

        Args:
            seed: for what is random; the same seed gives the same video.
        """
        raise NotImplementedError(type(self).__name__)

    def push(self, frames: Tensor, state: Any) -> Tensor:
        """The next frames; returns those that are ready."""
        raise NotImplementedError(type(self).__name__)

    def finish(self, state: Any) -> Tensor:
        """No more frames come; returns the rest. ``config.output_frames`` of all that went in are then out."""
        raise NotImplementedError(type(self).__name__)

    def checkpoint_digests(self) -> dict[str, str | None]:
        """Digest of each part's weight file, for the run record; empty where there are no weights."""
        return {}

    def run(self, frames: Tensor, fps: Fraction = Fraction(16), seed: int = 0) -> Tensor:
        """A whole video at once."""
        state = self.open(*frames.shape[1:3], fps, seed)
        return torch.cat([self.push(frames, state), self.finish(state)])
