"""What happens in one turn of a session: the worker is asked for one thing, and what comes of it is handed out."""

from __future__ import annotations

import logging
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from flashdreams.serving.config import ServeConfig
from flashdreams.serving.link import Link, WorkerError
from flashdreams.serving.metrics import Metrics
from flashdreams.serving.outbox import Delivery
from flashdreams.serving.sessions import Origin, Session, Turn, rows_to_json

log = logging.getLogger("flashdreams.serving")


class Turns:
    """Turns of sessions on the worker behind ``link``. A session whose worker died is first made again: from the last
    state saved in ``folder``, and by repeating the steps since, of which nothing is handed out twice."""

    def __init__(self, link: Link, config: ServeConfig, metrics: Metrics, folder: Path) -> None:
        self.link, self.config, self.metrics = link, config, metrics
        self._folder = folder

    async def take(self, session: Session) -> None:
        """One turn.

        Raises:
            WorkerError, WorkerDied: of the worker.
            Overflow: the client does not read what it is told.
        """
        if session.wants_begin is not None:
            await self._begin(session, session.wants_begin)
        elif session.epoch != self.link.epoch:
            await self._recover(session)
        elif session.replay:
            await self._replay(session)
        elif session.wants_snapshots and session.retry is None:
            await self._snapshot(session)
        else:
            await self._step(session)

    async def _ask(self, request: dict[str, Any], on_frames: Any = None) -> dict[str, Any]:
        return await self.link.ask(request, on_frames, timeout=self.config.chunk_timeout)

    def _origin_request(self, session: Session, origin: Origin) -> dict[str, Any]:
        if origin.path is not None:
            return {"op": "resume", "session": session.number, "path": str(origin.path)}
        return {"op": "open", "session": session.number, "scene": origin.scene}

    async def _begin(self, session: Session, origin: Origin) -> None:
        generation = session.generation
        answer = await self._ask(self._origin_request(session, origin))
        if session.wants_begin is not origin or session.closed is not None:
            return  # it was reset again meanwhile
        session.wants_begin, session.epoch, session.since_saved = None, self.link.epoch, 0
        session.origin = Origin(origin.scene, origin.path, origin.snapshot)
        session.next_chunk, session.next_frame = answer["next_chunk"], answer["frame"]
        session.stands(answer)
        scene = session.scene if origin.scene is None else origin.scene
        session.outbox.say({
            "type": "begun", "generation": generation, "chunk": session.next_chunk, "snapshot": origin.snapshot,
            "scene": scene.to_json() | {"image": None},
        })  # fmt: skip

    async def _recover(self, session: Session) -> None:
        origin = session.origin
        session.replay.clear()
        session.stands(await self._ask(self._origin_request(session, origin)))
        if session.origin is origin and session.wants_begin is None:
            session.replay.extend(origin.log)
            session.epoch = self.link.epoch
            session.outbox.say({"type": "notice", "code": "recovered", "message":
                                "the worker was replaced; the session goes on as if nothing had happened"})  # fmt: skip

    async def _replay(self, session: Session) -> None:
        events, rows = session.replay[0]
        answer = await self._ask({"op": "step", "session": session.number, "events": events, "rows": rows})
        if session.replay and session.wants_begin is None:
            session.replay.popleft()
            session.stands(answer)

    async def _step(self, session: Session) -> None:
        every = self.config.snapshot_every
        if every and session.since_saved >= every and session.retry is None:
            await self._save_origin(session)
            if session.wants_begin is not None or session.closed is not None:
                return
        turn = session.take()
        request = {"op": "step", "session": session.number, "events": turn.events, "rows": turn.rows}
        begun = time.perf_counter()
        computing: list[float] = []

        def deliver(facts: dict[str, Any], data: memoryview) -> None:
            computing.extend(facts["timings"].values())
            self._deliver(session, turn, facts, data)

        answer = await self._ask(request, deliver)
        self.metrics.chunk(time.perf_counter() - begun, sum(computing) + answer["commit"])
        if session.generation == turn.generation:
            session.made(turn, answer)
        if session.finished:
            session.outbox.say({"type": "finished", "generation": session.generation, "chunk": session.next_chunk})

    def _deliver(self, session: Session, turn: Turn, facts: dict[str, Any], data: memoryview) -> None:
        """Hand a chunk out, unless it is stale or was handed out before the worker died."""
        if session.generation != turn.generation or session.closed is not None:
            return
        if facts["chunk"] != session.next_chunk:
            return
        frames = np.frombuffer(data, np.uint8).reshape(facts["frames"])
        about = {
            "type": "chunk", "generation": turn.generation, "chunk": facts["chunk"],
            "first_frame": session.next_frame, "frames": len(frames), "digest": facts["digest"],
            "events": turn.events, "controls": rows_to_json(turn.rows), "refused": facts["refused"],
            "seconds": {name: round(value, 5) for name, value in facts["timings"].items()},
            "waiting": len(session.outbox), "dropped": session.outbox.dropped, "skipped": False,
        }  # fmt: skip
        delivery = Delivery(turn.generation, facts["chunk"], session.next_frame, frames, about)
        if session.sink is not None:
            session.sink.put(frames)
        dropped = session.outbox.dropped
        session.outbox.put(delivery)
        session.delivered(len(frames))
        self.metrics.frames += len(frames)
        self.metrics.dropped += session.outbox.dropped - dropped

    async def _save(self, session: Session) -> Path:
        with tempfile.NamedTemporaryFile(dir=self._folder, prefix=f"{session.number}-", delete=False) as file:
            path = Path(file.name)
        try:
            await self._ask({"op": "save", "session": session.number, "path": str(path)})
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return path

    async def _save_origin(self, session: Session) -> None:
        """Shorten what has to be repeated if the worker dies; a full disk only leaves it long."""
        session.since_saved = 0
        old, generation = session.origin.path, session.generation
        try:
            path = await self._save(session)
        except (WorkerError, OSError) as error:
            log.warning("state of session %d is not saved: %s", session.number, error)
            return
        if session.generation != generation or session.closed is not None:
            path.unlink(missing_ok=True)
            return
        session.origin = Origin(None, path)
        if old is not None and old not in {kept for kept, _ in session.snapshots.values()}:
            old.unlink(missing_ok=True)

    async def _snapshot(self, session: Session) -> None:
        session.wants_snapshots -= 1
        generation = session.generation
        try:
            path = await self._save(session)
        except (WorkerError, OSError) as error:
            session.outbox.say({"type": "error", "code": "snapshot", "message": f"not saved: {error}"[:300]})
            return
        if session.closed is not None:
            path.unlink(missing_ok=True)
        elif session.generation != generation:
            path.unlink(missing_ok=True)
            session.outbox.say({"type": "error", "code": "snapshot", "message": "not saved: the session was reset"})
        else:
            name = session.keep(path)
            session.outbox.say({"type": "snapshot", "snapshot": name, "chunk": session.next_chunk})
