"""Who gets the next chunk: sessions in turn, on a worker that is replaced when it dies."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from flashdreams.serving.admission import Room
from flashdreams.serving.config import ServeConfig
from flashdreams.serving.link import Link, WorkerDied, WorkerError
from flashdreams.serving.metrics import Metrics
from flashdreams.serving.outbox import Overflow
from flashdreams.serving.protocol import ProtocolError
from flashdreams.serving.scene import Scene
from flashdreams.serving.sessions import Session, SessionOptions
from flashdreams.serving.turns import Turns

log = logging.getLogger("flashdreams.serving")
MAX_STARTS = 3
"""Workers in a row that may fail to start before the server gives up."""


class Scheduler:
    """Owns all sessions. Everything here runs on the event loop; only the link's worker computes.

    Args:
        folder: for saved states; private to the server.
    """

    def __init__(
        self, link: Link, config: ServeConfig, pixels: int, metrics: Metrics, folder: Path,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.link = link
        self.config = config
        self.metrics = metrics
        self.room = Room(config.max_sessions, pixels)
        self.sessions: dict[str, Session] = {}
        self.broken: str | None = None
        """Why no more chunks will be made, if so."""
        self.started: dict[str, Any] = {}
        """What the worker said of itself when it was ready."""
        self.freed = asyncio.Event()
        """Set when a session ends."""
        self._folder = folder
        self._clock = clock
        self._turns = Turns(link, config, metrics, folder)
        self._order: deque[Session] = deque()
        self._orphans: list[int] = []
        """Numbers of sessions that ended, whose memory in the worker is to be freed."""
        self._numbers = 0
        self._wake = asyncio.Event()
        self._pixels = pixels

    async def start(self) -> None:
        """Start the worker.

        Raises:
            WorkerError, WorkerDied: it cannot load the model.
        """
        self.started = await self.link.start()
        self.room = Room.of(self.config.max_sessions, self._pixels, self.started)

    def admit(self, scene: Scene, options: SessionOptions) -> Session:
        """A new session.

        Raises:
            ProtocolError: ``busy``, with the reason.
        """
        refusal = self.broken or self.room.refusal(
            [each.num_bytes or self.room.cost(each.scene.height, each.scene.width) for each in self._order],
            scene.height, scene.width,
        )  # fmt: skip
        if refusal is not None:
            self.metrics.refused += 1
            raise ProtocolError("busy", refusal)
        self._numbers += 1
        session = Session(self._numbers, scene, options, self._clock)
        self.sessions[session.id] = session
        self._order.append(session)
        return session

    def wake(self) -> None:
        """Look again: something was said, taken or attached."""
        self._wake.set()

    def end(self, session: Session, reason: str, message: str = "") -> None:
        """End a session; nothing happens if it has ended already."""
        if session.closed is not None:
            return
        session.closed = reason
        self.sessions.pop(session.id, None)
        self._order.remove(session)
        self._orphans.append(session.number)
        for path in self._folder.glob(f"{session.number}-*"):
            path.unlink(missing_ok=True)
        if session.sink is not None:
            session.sink.end()
        session.outbox.last({"type": "closed", "reason": reason, "message": message})
        self.freed.set()
        self.wake()

    async def run(self) -> None:
        """Serve until cancelled."""
        while True:
            self._wake.clear()
            self._look_after()
            try:
                if not self.link.alive:
                    raise WorkerDied
                while self._orphans:
                    await self.link.ask({"op": "close", "session": self._orphans[-1]}, timeout=60.0)
                    self._orphans.pop()
            except WorkerDied:
                await self._replace_worker()
                continue
            session, pause = self._choose()
            if session is None:
                with suppress(TimeoutError):  # wait_for loses a cancellation that comes with the wake (Python 3.11)
                    async with asyncio.timeout(pause):
                        await self._wake.wait()
                continue
            await self._turn(session)

    def _choose(self) -> tuple[Session | None, float]:
        """The first session in line that can go on; or how long to wait for one."""
        soonest = 0.5
        for session in self._order:
            wait = session.wait()
            if wait == 0.0:
                self._order.remove(session)
                self._order.append(session)
                return session, 0.0
            if wait is not None:
                soonest = min(soonest, wait)
        return None, soonest

    def _look_after(self) -> None:
        """Close the sessions that nobody uses any more."""
        now = self._clock()
        for session in list(self._order):
            if session.left is not None and now - session.left > self.config.linger:
                self.end(session, "lost", "the connection broke and its client did not come back")
            elif not session.options.idle_exempt and now - session.heard > self.config.idle_timeout:
                self.end(session, "idle", f"nothing was said for {self.config.idle_timeout:g} seconds")

    async def _turn(self, session: Session) -> None:
        place = session.place
        try:
            await self._turns.take(session)
        except WorkerError as error:
            self.metrics.failed += 1
            log.warning("session %d ended: %s", session.number, error)
            self.end(session, "failed", f"{error}"[:500])
        except WorkerDied:
            if session.died_at == place:
                self.end(session, "failed", "the worker died of it twice")
            session.died_at = place
            await self._replace_worker()
        except Overflow:
            self.end(session, "lost", "the client does not read its messages")

    async def _replace_worker(self) -> None:
        """Start another worker, in which sessions are made again when their turn comes."""
        self.metrics.restarts += 1
        log.warning("the worker died; starting another")
        for attempt in range(MAX_STARTS):
            try:
                self.started = await self.link.start()
            except (WorkerDied, WorkerError) as error:
                log.warning("the worker does not start: %s", error)
                await asyncio.sleep(attempt)
            else:
                self._orphans.clear()
                return
        self.broken = "the model's worker does not start any more; the server has to be looked after"
        for session in list(self._order):
            self.end(session, "failed", self.broken)
        await asyncio.Event().wait()
