"""From chunks to a stream: frames one by one, at the speed of the video, the newest first where it is live."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

import numpy as np

MAX_CHUNKS = 2
"""That wait in a live session; of a further one, the oldest frames make room."""
HOLD = 1.0
"""Seconds after which a frame that is still shown is sent again: who lost it, or came late, sees it then."""


class Playout:
    """Chunks go in, frames come out, one each 1/``fps`` seconds. Where more than a chunk waits in a live session, it is
    shown within the time of a chunk, so that no delay lasts. Belongs to the event loop.

    Args:
        fps: frames per second of the video.
        generation: gives the session's present generation; frames of an older one are not shown.
        lossless: chunks wait for room, instead of the oldest frames being dropped.
    """

    def __init__(
        self, fps: float, generation: Callable[[], int], lossless: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.dropped = 0
        """Frames that made room for newer ones."""
        self.closed = False
        self._interval = 1.0 / fps
        self._generation, self._lossless, self._clock = generation, lossless, clock
        self._waiting: deque[tuple[int, np.ndarray]] = deque()
        self._length = 1
        """Frames of the newest chunk."""
        self._changed = asyncio.Event()
        self._due = clock()
        self._shown: np.ndarray | None = None

    def __len__(self) -> int:
        """Frames that wait."""
        return len(self._waiting)

    async def put(self, generation: int, frames: np.ndarray) -> bool:
        """Queue a chunk's frames, uint8 ``[T, H, W, 3]``; whether they were taken, which they are until :meth:`close`.
        A lossless queue takes them once less than a chunk waits."""
        while self._lossless and not self.closed and len(self._waiting) >= self._length:
            await self._change()
        if self.closed:
            return False
        self._length = len(frames)
        self._waiting.extend((generation, frame) for frame in frames)
        while not self._lossless and len(self._waiting) > MAX_CHUNKS * self._length:
            self._waiting.popleft()
            self.dropped += 1
        self._changed.set()
        return True

    async def next(self) -> tuple[np.ndarray, float]:
        """The next frame, uint8 ``[H, W, 3]``, once it is due, and its moment on the clock in seconds, which grows
        from frame to frame. While none comes, the last one is given again, once a second."""
        while True:
            while self._waiting and self._waiting[0][0] != self._generation():
                self._waiting.popleft()
                self._changed.set()
            now = self._clock()
            if self._waiting:
                if now < self._due:
                    await asyncio.sleep(self._due - now)
                    continue
                speed = 1.0 if self._lossless else max(1.0, len(self._waiting) / self._length)
                _, self._shown = self._waiting.popleft()
                self._changed.set()
                return self._shown, self._moment(now, self._interval / speed)
            try:
                async with asyncio.timeout(None if self._shown is None else self._due + HOLD - now):
                    await self._change()
            except TimeoutError:
                assert self._shown is not None
                return self._shown, self._moment(self._clock(), self._interval)

    def close(self) -> None:
        """Take no more; whoever waits for room waits no longer."""
        self.closed = True
        self._waiting.clear()
        self._changed.set()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _moment(self, now: float, step: float) -> float:
        """When a frame is shown that is due: evenly after the one before, or now if that is long ago."""
        moment = self._due if now - self._due < self._interval else now
        self._due = moment + step
        return moment
