"""Controls that come at any time, from any thread, as the frames of a rollout."""

from __future__ import annotations

import math
import threading
from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Any

from flashdreams.core.controls import resample
from flashdreams.core.controls.spec import ControlSpec
from flashdreams.core.controls.types import Control, ControlError

MAX_TIME = 1e12
"""Seconds: what float64 still resolves to a fraction of a frame."""
MAX_WAITING = 100_000
"""Events that may wait to be read: more than a person makes in an hour."""
_RESAMPLE: dict[str, Callable[..., list[Any]]] = {
    "keys": resample.keys,
    "mouse": resample.mouse,
    "pose": resample.poses,
    "frame": resample.frames,
}


class ControlTimeline:
    """What was said when, in seconds of the video, and what that means for each of its frames.

    Usable as the ``control`` of a rollout. Each kind has a track of its own, so that a key stays held while the mouse
    moves. Keys, words, numbers and pictures hold until the next event; a key pressed and released within one frame is
    held for that frame; mouse motion adds up, and all of it is used once; poses are interpolated; of video frames the
    nearest is taken.

    Read as a rollout's source, it forgets what lies before the frames it has handed out, so an endless session needs
    no more and no more memory. Events that come too late for their frame count for the first one not handed out. A
    timeline that is read so belongs to one rollout.

    Args:
        fps: frames per second of the video.
        takes: refuse what this model does not take, when it is added.
    """

    def __init__(self, fps: float, takes: ControlSpec | None = None) -> None:
        if not (math.isfinite(fps) and fps > 0):
            raise ControlError(f"fps is {fps}; expected a finite number above 0")
        self.fps = fps
        self._takes = takes
        self._lock = threading.Lock()
        self._tracks: dict[str, list[tuple[float, Any]]] = {}
        self._handed = 0
        """First frame that was not handed out."""
        self._answer: tuple[tuple[int, int], list[Control | None]] | None = None

    def add(self, time: float, control: Any) -> None:
        """Say ``control`` at ``time`` seconds. Any thread may, in any order.

        Raises:
            ControlError: the model does not take it, the time is no time, or too many events wait to be read.
        """
        if isinstance(time, bool) or not isinstance(time, (int, float)) or not 0 <= time < MAX_TIME:
            raise ControlError(f"time of a control is {time!r:.40}; expected seconds from the start, 0 or more")
        said = Control.of(control) if self._takes is None else self._takes.check(control)
        with self._lock:
            at = max(resample.position(time, self.fps), self._handed)
            for kind in said.said if said else ():
                track = self._tracks.setdefault(kind, [])
                if len(track) >= MAX_WAITING:
                    raise ControlError(f"{len(track)} controls wait to be read; read them, or begin a new timeline")
                insort(track, (at, getattr(said, kind)), key=_moment)

    def frames(self, start: int, stop: int) -> list[Control | None]:
        """The controls of frames ``start`` to ``stop - 1``; nothing is forgotten."""
        with self._lock:
            return self._frames(start, stop)

    def __call__(self, start: int, stop: int) -> list[Control | None]:
        """The same, for a rollout: what only mattered before ``stop`` is forgotten. Asked again for the same frames,
        as for a chunk that failed, it gives the same answer."""
        with self._lock:
            if self._answer is None or self._answer[0] != (start, stop):
                self._answer = (start, stop), self._frames(start, stop)
                self._handed = max(self._handed, stop)
                for track in self._tracks.values():
                    del track[: max(0, bisect_left(track, stop, key=_moment) - 1)]
            return list(self._answer[1])

    def _frames(self, start: int, stop: int) -> list[Control | None]:
        columns = {kind: _RESAMPLE.get(kind, resample.held)(track, start, stop) for kind, track in self._tracks.items()}
        rows = (Control(**{kind: column[i] for kind, column in columns.items()}) for i in range(stop - start))
        return [Control.of(row) for row in rows]


def _moment(event: tuple[float, Any]) -> float:
    return event[0]
