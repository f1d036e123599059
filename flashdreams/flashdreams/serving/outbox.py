"""What waits to be sent to one client: bounded, the newest first where it is live, and nothing stale after a reset."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

MAX_MESSAGES = 256
MAX_CHUNKS = 3


@dataclass(frozen=True)
class Delivery:
    """The frames of one chunk, uint8 ``[T, H, W, 3]``, and the message about it that goes before them."""

    generation: int
    chunk: int
    first_frame: int
    frames: np.ndarray
    about: dict[str, Any]


class Overflow(Exception):
    """The client does not read its messages."""


class Outbox:
    """Messages and chunks for one client. ``lossless``: the chunks wait and the model with them; else the oldest one
    makes room. Belongs to the event loop."""

    def __init__(self, lossless: bool) -> None:
        self.lossless = lossless
        self.dropped = 0
        """Frames that made room for newer ones."""
        self._items: deque[dict[str, Any] | Delivery] = deque()
        self._chunks = 0
        self._filled = asyncio.Event()

    def __len__(self) -> int:
        """Chunks that wait."""
        return self._chunks

    @property
    def full(self) -> bool:
        """Whether another chunk would be one too many."""
        return self._chunks >= MAX_CHUNKS

    def say(self, message: dict[str, Any]) -> None:
        """Queue a message.

        Raises:
            Overflow: too many wait already.
        """
        if len(self._items) - self._chunks >= MAX_MESSAGES:
            raise Overflow
        self._items.append(message)
        self._filled.set()

    def put(self, delivery: Delivery) -> None:
        """Queue a chunk.

        Raises:
            Overflow: the client has not even read what was left out.
        """
        if self.full:
            assert not self.lossless, "the scheduler makes no chunk for a full lossless queue"
            self._skip(next(i for i, item in enumerate(self._items) if isinstance(item, Delivery)))
        self._items.append(delivery)
        self._chunks += 1
        self._filled.set()

    def clear(self) -> None:
        """Leave out the frames that wait."""
        for i, item in enumerate(self._items):
            if isinstance(item, Delivery):
                self._skip(i)

    def last(self, message: dict[str, Any]) -> None:
        """Say this instead of all that waits."""
        self._items.clear()
        self._chunks = 0
        self.say(message)

    def _skip(self, place: int) -> None:
        """Only tell of a chunk: whoever keeps a record of the session needs to know of every one."""
        delivery = self._items[place]
        assert isinstance(delivery, Delivery)
        if len(self._items) - self._chunks >= MAX_MESSAGES:
            raise Overflow
        self._items[place] = delivery.about | {"skipped": True}
        self._chunks -= 1
        self.dropped += len(delivery.frames)

    async def next(self) -> dict[str, Any] | Delivery:
        """The next message or chunk, in the order they came, once there is one."""
        while not self._items:
            self._filled.clear()
            await self._filled.wait()
        item = self._items.popleft()
        self._chunks -= isinstance(item, Delivery)
        return item
