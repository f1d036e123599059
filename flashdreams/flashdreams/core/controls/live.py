"""Controls of a person who watches: what was said while a chunk was made goes into the next."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from flashdreams.core.controls.spec import ControlSpec
from flashdreams.core.controls.timeline import MAX_WAITING, ControlTimeline
from flashdreams.core.controls.types import Control, ControlError, Mouse

MAX_PIXELS_WAITING = 512
"""Pictures and video frames that may wait: several seconds of a camera."""


class LiveControls:
    """Controls of someone who watches the video as it is made. Usable as the ``control`` of a rollout.

    What was said since the last chunk was asked for goes into the next one, however long either took, so that what a
    person does shows as soon as it can. Keys, words, numbers and pictures hold from the chunk's first frame; motion of
    the mouse, camera poses and video frames are spread over its frames as they came. The rules of
    :class:`ControlTimeline` hold: no press of a key and no motion is lost. One of these belongs to one rollout.

    Args:
        takes: refuse what this model does not take, when it is added.
        clock: seconds, never going back.
    """

    def __init__(self, takes: ControlSpec | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._takes = takes
        self._clock = clock
        self._lock = threading.Lock()
        self._read = clock()
        self._said: list[tuple[float, Control]] = []
        self._pixels = 0
        """How many of those hold pixels."""
        self._frames = ControlTimeline(1.0)

    def add(self, control: Any) -> None:
        """Say ``control`` now. Any thread may.

        Raises:
            ControlError: the model does not take it, or too many events wait to be read.
        """
        said = Control.of(control) if self._takes is None else self._takes.check(control)
        with self._lock:
            if said is None:
                return
            pixels = said.picture is not None or said.frame is not None
            if len(self._said) >= MAX_WAITING or (pixels and self._pixels >= MAX_PIXELS_WAITING):
                raise ControlError(f"{len(self._said)} controls wait for the next chunk; skip() drops them")
            self._pixels += pixels
            self._said.append((self._clock(), said))

    def skip(self) -> None:
        """Leave out the motion and the short presses that wait, as after a pause; what is held stays held."""
        with self._lock:
            held: dict[str, Any] = {}
            for _, said in self._said:
                held |= {kind: getattr(said, kind) for kind in said.said}
            if "mouse" in held:
                held["mouse"] = Mouse(buttons=held["mouse"].buttons)
            self._read = self._clock()
            self._said = [(self._read, Control(**held))] if held else []
            self._pixels = int("picture" in held or "frame" in held)

    def __call__(self, start: int, stop: int) -> list[Control | None]:
        with self._lock:
            now, said = self._clock(), self._said
            begun, self._read, self._said, self._pixels = self._read, now, [], 0
        count, last = stop - start, max(0, stop - start - 1)
        for moment, control in said:
            share = (moment - begun) / (now - begun) if now > begun else 0.0
            spread = {"mouse": min(share * count, last), "pose": share * last, "frame": share * last}
            for kind in control.said:
                self._frames.add(start + spread.get(kind, 0.0), getattr(control, kind))
        return self._frames(start, stop)
