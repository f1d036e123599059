"""One session: what it shows, what was said since the last chunk, and how to make its state again."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from flashdreams.core.controls import Control, ControlSpec, LiveControls, control_to_json
from flashdreams.serving.outbox import Outbox
from flashdreams.serving.protocol import ProtocolError
from flashdreams.serving.scene import Scene

MAX_SNAPSHOTS = 4
"""Kept of one session; a further one takes the place of the oldest."""
LEAD = 1
"""Chunks that a live session which fell behind may make at once, to be in time again."""


class FrameSink(Protocol):
    """What else takes every frame of a session, such as a video file."""

    @property
    def full(self) -> bool: ...
    def put(self, frames: Any) -> None: ...
    def end(self) -> None: ...


@dataclass
class Turn:
    """What goes into one chunk. Kept until the chunk is committed, in case it has to be made again."""

    generation: int
    events: list[dict[str, Any]]
    rows: list[Control | None]


@dataclass
class Origin:
    """From where a session's state can be made again: a scene, or a state saved at ``path``; then ``log`` upon it."""

    scene: Scene | None
    path: Path | None = None
    snapshot: str | None = None
    """The name that the client has for ``path``."""
    log: list[tuple[list[dict[str, Any]], list[Control | None]]] = field(default_factory=list)


@dataclass(frozen=True)
class SessionOptions:
    """What does not change while a session lives."""

    fps: float
    takes: ControlSpec
    lossless: bool = False
    num_chunk: int | None = None
    script: Sequence[Control | None] = ()
    idle_exempt: bool = False


class Session:
    """State of one session on the event loop's side. Nothing here waits or blocks."""

    def __init__(self, number: int, scene: Scene, options: SessionOptions, clock: Callable[[], float] = time.monotonic):
        self.id = "session_" + secrets.token_urlsafe(18)
        self.number = number
        self.scene = scene
        self.options = options
        self.outbox = Outbox(options.lossless)
        self.sink: FrameSink | None = None
        self.video: str | None = None
        """Name of the video that ``sink`` writes."""
        self.origin = Origin(scene)
        self.generation = 0
        self.paused = False
        self.attached = False
        self.closed: str | None = None
        """Why it ended, if it did."""
        self.num_bytes = 0
        self.heard = clock()
        self.left: float | None = clock()
        """Since when no client is attached."""
        self.epoch = -1
        """Of the worker that holds its state."""
        self.replay: deque[tuple[list[dict[str, Any]], list[Control | None]]] = deque()
        """Steps that bring a new worker where the old one was."""
        self.retry: Turn | None = None
        """The turn that was not committed."""
        self.died_at: tuple[int, ...] | None = None
        """Where it was when a worker died in its turn."""
        self.next_chunk = 0
        self.next_frame = 0
        self.next_controls: tuple[int, int] = (0, 0)
        self.chunks_made = 0
        self.since_saved = 0
        self.snapshots: dict[str, tuple[Path, Scene]] = {}
        self.wants_snapshots = 0
        self.wants_begin: Origin | None = self.origin
        """From where to begin anew before the next chunk."""
        self._clock = clock
        self._prompt: dict[str, Any] | None = None
        self._live = LiveControls(options.takes, clock)
        self._due = clock()

    def touch(self) -> None:
        """The client showed that it is there."""
        self.heard = self._clock()

    def leave(self) -> None:
        """The client is gone, perhaps to come back."""
        self.attached, self.left = False, self._clock()

    def control(self, control: Any) -> None:
        """Hold ``control`` from the next chunk on; ControlError where the model does not take it."""
        self._live.add(control)

    def prompt(self, prompt: str, negative_prompt: str | None, policy: str | None) -> None:
        """Show ``prompt`` from the next chunk on; of several, the last one counts."""
        self.scene = replace(self.scene, prompt=prompt, negative_prompt=negative_prompt)
        if self.wants_begin is not None and self.wants_begin.path is None:
            self.wants_begin = Origin(self.scene)
            return
        event = {"type": "prompt", "prompt": prompt, "negative_prompt": negative_prompt, "policy": policy}
        self._prompt = event

    def reset(self, seed: int | None = None) -> None:
        """Begin anew with the present prompt: a new generation."""
        if seed is not None:
            self.scene = replace(self.scene, seed=seed)
        self._begin_from(Origin(self.scene))

    def restore(self, snapshot: str) -> None:
        """Go on from a snapshot: a new generation."""
        if snapshot not in self.snapshots:
            raise ProtocolError("unknown_snapshot", f"there is no snapshot {snapshot!r} of this session")
        path, self.scene = self.snapshots[snapshot]
        self._begin_from(Origin(None, path, snapshot))

    def _begin_from(self, origin: Origin) -> None:
        self.generation += 1
        self.wants_begin, self.retry, self._prompt = origin, None, None
        self.replay.clear()
        self.outbox.clear()
        self._live.skip()
        self._due = self._clock()

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False
        self._live.skip()
        self._due = max(self._due, self._clock())

    @property
    def finished(self) -> bool:
        """Whether it made all the chunks it was asked for."""
        return self.options.num_chunk is not None and self.next_chunk >= self.options.num_chunk and not self.busywork

    @property
    def busywork(self) -> bool:
        """Whether there is something to do at the boundary besides the next chunk."""
        return self.wants_begin is not None or bool(self.replay) or self.wants_snapshots > 0

    @property
    def place(self) -> tuple[int, ...]:
        """What its next turn is about: a worker that dies there twice does not do so by chance."""
        return self.generation, self.wants_begin is not None, len(self.replay), self.next_chunk

    def wait(self) -> float | None:
        """Seconds until its next turn; ``None`` while it waits for somebody."""
        if self.closed is not None or not self.attached or self.finished:
            return None
        if self.wants_begin is not None or self.wants_snapshots:
            return 0.0
        if self.paused or (self.sink is not None and self.sink.full) or (self.options.lossless and self.outbox.full):
            return None
        return 0.0 if self.options.lossless or self.replay else max(0.0, self._due - self._clock())

    def take(self) -> Turn:
        """What goes into the next chunk, all that was said up to now."""
        if self.retry is not None:
            return self.retry
        events = [] if self._prompt is None else [self._prompt]
        self._prompt = None
        self.retry = Turn(self.generation, events, self._rows(*self.next_controls))
        return self.retry

    def _rows(self, start: int, stop: int) -> list[Control | None]:
        script = self.options.script
        known = list(script[start:stop])
        return known + (self._live(start + len(known), stop) if len(known) < stop - start else [])

    def made(self, turn: Turn, answer: dict[str, Any]) -> None:
        """The chunk is committed."""
        self.retry = None
        self.since_saved += 1
        self.origin.log.append((turn.events, turn.rows))
        self.stands(answer)

    def stands(self, answer: dict[str, Any]) -> None:
        """Where the worker's answer says the rollout stands."""
        self.next_controls = answer["next_controls"]
        if "frame" in answer:
            self.num_bytes = answer["bytes"]

    def delivered(self, frames: int) -> None:
        """So many frames were handed out: when the next chunk is due."""
        now, length = self._clock(), frames / self.options.fps
        self._due = max(self._due + length, now - LEAD * length)
        self.next_chunk += 1
        self.next_frame += frames
        self.chunks_made += 1

    def keep(self, path: Path) -> str:
        """Remember a saved state; returns its name. The oldest is forgotten where there are too many."""
        name = "snapshot_" + secrets.token_urlsafe(9)
        self.snapshots[name] = path, self.scene
        while len(self.snapshots) > MAX_SNAPSHOTS:
            oldest, _ = self.snapshots.pop(next(iter(self.snapshots)))
            if oldest not in (self.origin.path, self.wants_begin and self.wants_begin.path):
                oldest.unlink(missing_ok=True)
        return name


def rows_to_json(rows: Sequence[Control | None]) -> list[dict[str, Any] | None]:
    """Controls of a chunk's frames, as its message tells them."""
    return [None if row is None else control_to_json(row) for row in rows]
