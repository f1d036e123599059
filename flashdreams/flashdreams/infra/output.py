"""Frames on their way from the model to the file."""

from __future__ import annotations

import time
from collections.abc import Callable
from fractions import Fraction
from types import TracebackType

from torch import Tensor

from flashdreams.core.media.video import VideoWriter
from flashdreams.core.notices import say_once
from flashdreams.infra.postprocess.contract import Postprocessor
from flashdreams.infra.preview import FrameSample


class FrameOutput:
    """Post-processes what a model makes, chunk by chunk, and writes it; looks at some of it for the contact sheet.

    As a context manager it finishes the post-processing also when the block ends by an exception or Ctrl-C, so that
    nothing that was generated is lost with it.
    """

    def __init__(
        self, writer: VideoWriter, postprocessor: Postprocessor, size: tuple[int, int], fps: Fraction, seed: int,
        sheet: FrameSample | None = None,
    ) -> None:  # fmt: skip
        self._writer = writer
        self._postprocessor = postprocessor
        self._state = postprocessor.open(*size, fps, seed)
        self._sheet = sheet
        self._torn = False
        self.seconds = 0.0
        """What post-processing took so far."""
        self.written = False
        """Whether any frame is in the file."""

    def add(self, frames: Tensor) -> None:
        """The next frames, uint8 ``[T, H, W, 3]``."""
        self._write(lambda: self._postprocessor.push(frames, self._state))
        self._torn = False

    def finish(self) -> None:
        """No more frames come."""
        self._write(lambda: self._postprocessor.finish(self._state))

    def __enter__(self) -> FrameOutput:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._torn:
            return
        try:
            self.finish()
        except Exception as second:
            if error is None:
                raise
            say_once(f"frames that were still to be post-processed are lost: {second}")

    def _write(self, make: Callable[[], Tensor]) -> None:
        self._torn = True  # a state in which an error left it is not to be used
        begun = time.perf_counter()
        frames = make().numpy()
        self.seconds += time.perf_counter() - begun
        if len(frames) == 0:
            return
        self._writer.write(frames)
        self.written = True
        if self._sheet is not None:
            self._sheet.add(frames)
