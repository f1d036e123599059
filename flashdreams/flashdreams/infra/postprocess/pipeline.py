"""A streaming video-to-video model as a post-processor."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flashdreams.core.controls import Control, Frame
from flashdreams.infra.chunk import Chunk
from flashdreams.infra.pipeline import StreamInferencePipeline
from flashdreams.infra.postprocess.config import PipelinePostprocessorConfig
from flashdreams.infra.postprocess.contract import Postprocessor
from flashdreams.infra.rollout import Rollout


class FrameQueue:
    """Frames of a video as controls of a rollout, of which those that can still be asked for are kept."""

    def __init__(self) -> None:
        self.first = 0
        """Number of the first frame that is kept."""
        self.kept: deque[Control] = deque()

    @property
    def stop(self) -> int:
        """Number of the frame that comes next."""
        return self.first + len(self.kept)

    def add(self, pixels: np.ndarray) -> None:
        self.kept.append(Control(frame=Frame(pixels)))

    def repeat_last(self, stop: int) -> None:
        """Until there are ``stop`` frames."""
        self.kept.extend([self.kept[-1]] * (stop - self.stop))

    def drop(self, first: int) -> None:
        """Those before frame ``first``."""
        while self.first < first:
            self.kept.popleft()
            self.first += 1

    def __call__(self, start: int, stop: int) -> list[Control]:
        return [self.kept[i - self.first] for i in range(start, stop)]


@dataclass
class PipelineState:
    """One video on its way through the model."""

    size: tuple[int, int]
    """Height and width of what comes out."""
    padding: tuple[tuple[int, int], ...]
    """What the model needs below and on the right, beyond what there is."""
    rollout: Rollout
    queue: FrameQueue
    received: int = 0
    made: int = 0
    chunks: int = 0


class PipelinePostprocessor(Postprocessor):
    """Frames wait until a chunk has its own and those it looks ahead at; then it is made and handed out.

    Memory is that of one chunk and of the model's own context, however long the video is.
    """

    config: PipelinePostprocessorConfig

    def __init__(
        self, config: PipelinePostprocessorConfig, device: str = "cpu", pipeline: StreamInferencePipeline | None = None
    ) -> None:
        super().__init__(config, device)
        self.pipeline = pipeline or config.pipeline.setup(device=device)

    def open(self, height: int, width: int, fps: Fraction, seed: int = 0) -> PipelineState:
        scale, multiple = self.config.scale, self.config.pipeline.size_multiple
        step = multiple // math.gcd(multiple, scale)
        below, right = -height % step, -width % step
        queue = FrameQueue()
        rollout = self.pipeline.rollout(
            self.config.prompt, seed=seed, control=queue, height=(height + below) * scale, width=(width + right) * scale
        )
        return PipelineState((height * scale, width * scale), ((0, below), (0, right), (0, 0)), rollout, queue)

    def push(self, frames: Tensor, state: PipelineState) -> Tensor:
        return torch.cat([self._none(state), *(chunk.frames for chunk in self.chunks(frames, state))])

    def finish(self, state: PipelineState) -> Tensor:
        return torch.cat([self._none(state), *(chunk.frames for chunk in self.rest(state))])

    def chunks(self, frames: Tensor, state: PipelineState) -> Iterator[Chunk]:
        """The next frames; makes the chunks that are ready, in the size that is handed out."""
        for frame in frames:
            state.queue.add(np.pad(frame.numpy(), state.padding, mode="edge"))
            state.received += 1
            if state.queue.stop == self._needed(state):
                yield self._next(state)

    def rest(self, state: PipelineState) -> Iterator[Chunk]:
        """The chunks of the frames that are left. The last frame is repeated for what they need, and what is made
        beyond the video is dropped."""
        while state.made < state.received:
            state.queue.repeat_last(self._needed(state))
            left = state.received - state.made
            chunk = self._next(state)
            yield chunk.with_frames(chunk.frames[:left])
        state.rollout.close()

    def checkpoint_digests(self) -> dict[str, str | None]:
        return self.pipeline.checkpoint_digests()

    def _stop(self, state: PipelineState) -> int:
        """Number of the frame after the next chunk."""
        return self.config.pipeline.frames_until(state.chunks + 1)

    def _needed(self, state: PipelineState) -> int:
        """How many frames there must be for the next chunk."""
        encoder: Any = self.config.pipeline.encoder
        return self._stop(state) + encoder.lookahead

    def _next(self, state: PipelineState) -> Chunk:
        chunk = next(state.rollout)
        state.made, state.chunks = self._stop(state), state.chunks + 1
        state.queue.drop(state.made)
        height, width = state.size
        return chunk.with_frames(chunk.frames[:, :height, :width])

    def _none(self, state: PipelineState) -> Tensor:
        return torch.empty(0, *state.size, 3, dtype=torch.uint8)
