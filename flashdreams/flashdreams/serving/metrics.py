"""Figures for operators, as Prometheus reads them."""

from __future__ import annotations

import os
from collections.abc import Iterable

BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    """Counts since the server began."""

    def __init__(self) -> None:
        self.frames = 0
        self.dropped = 0
        self.refused = 0
        self.failed = 0
        self.restarts = 0
        self.messages = 0
        self.bad_messages = 0
        self.denied = 0
        self.videos = 0
        self.chunk_seconds = 0.0
        self.overhead_seconds = 0.0
        """Of chunks, what was not the worker's computing: the pipe, the event loop, waiting for either."""
        self.chunks = 0
        self._buckets = [0] * len(BUCKETS)

    def chunk(self, seconds: float, computing: float) -> None:
        """A chunk took so long, from the request to its commit; of this, the worker computed so long."""
        self.overhead_seconds += max(0.0, seconds - computing)
        self.chunks += 1
        self.chunk_seconds += seconds
        for i, bound in enumerate(BUCKETS):
            self._buckets[i] += seconds <= bound

    def text(self, gauges: Iterable[tuple[str, str, float]]) -> str:
        """The page; ``gauges`` are present values as (name, help, value)."""
        counters = [
            ("chunks_total", "Chunks made", self.chunks),
            ("frames_total", "Frames handed out", self.frames),
            ("frames_dropped_total", "Frames that made room for newer ones", self.dropped),
            ("sessions_refused_total", "Sessions refused because there was no room", self.refused),
            ("sessions_failed_total", "Sessions that ended by an error", self.failed),
            ("worker_restarts_total", "Workers that were replaced", self.restarts),
            ("messages_total", "Messages of clients", self.messages),
            ("messages_bad_total", "Messages that could not be used", self.bad_messages),
            ("requests_denied_total", "Requests denied: token, origin, host or rate", self.denied),
            ("videos_total", "Videos asked for", self.videos),
            ("overhead_seconds_total", "Seconds of chunks beyond the model's computing", self.overhead_seconds),
        ]
        lines = []
        for kind, rows in (("counter", counters), ("gauge", gauges)):
            for name, text, value in rows:
                full = f"flashdreams_{name}"
                lines += [f"# HELP {full} {text}.", f"# TYPE {full} {kind}", f"{full} {value:g}"]
        name = "flashdreams_chunk_seconds"
        lines += [
            f"# HELP {name} Seconds from asking the worker for a chunk to its commit.",
            f"# TYPE {name} histogram",
        ]
        bounds = [*(f"{bound:g}" for bound in BUCKETS), "+Inf"]
        counts = [*self._buckets, self.chunks]
        lines += [f'{name}_bucket{{le="{bound}"}} {count}' for bound, count in zip(bounds, counts, strict=True)]
        lines += [f"{name}_sum {self.chunk_seconds:g}", f"{name}_count {self.chunks}"]
        return "\n".join(lines) + "\n"


def resident_bytes(pid: int | str = "self") -> int:
    """Memory of a process, where this is known."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
