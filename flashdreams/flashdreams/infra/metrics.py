"""What a run took, by phase, under names that mean one thing each."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field

from flashdreams.infra.rollout import Chunk


@dataclass
class RunMetrics:
    """Collects the chunks of one run. All times are seconds.

    Frame rates divide the frames that the model made by one phase's time: ``dit`` (denoising), ``decode``,
    ``postprocess``, and end to end (everything from the first chunk's start to the last frame written, commits
    included).
    """

    load: float = 0.0
    begun: float = field(default_factory=time.perf_counter)
    first_frame: float | None = None
    """From the start of generation to the first frames in the file."""
    postprocess: float = 0.0
    ended: float = 0.0
    frames: int = 0
    chunks: list[dict[str, float]] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    _previous: float = 0.0

    def start(self) -> None:
        """Generation starts now."""
        self.begun = self._previous = time.perf_counter()

    def add(self, chunk: Chunk, *, written: bool = True) -> None:
        """A chunk is made, and what came of it is in hand; nothing yet (``written``), if post-processing holds it."""
        now = time.perf_counter()
        if self.first_frame is None and written:
            self.first_frame = now - self.begun
        self.latencies.append(now - self._previous)
        self._previous = now
        self.frames += len(chunk.frames)
        self.chunks.append(chunk.timings)

    def stop(self) -> None:
        """The last frame is written."""
        self.ended = time.perf_counter()
        if self.first_frame is None:  # all of it waited for the end
            self.first_frame = self.ended - self.begun

    @property
    def fps(self) -> float:
        """End to end, so far."""
        return self.frames / max(1e-9, (self.ended or time.perf_counter()) - self.begun)

    def summary(self) -> dict[str, float]:
        """Figures for the run record."""
        figures = {"load_s": self.load, "time_to_first_frame_s": self.first_frame or 0.0, "frames": self.frames}
        for phase in ("dit", "decode", "commit"):
            seconds = sum(timings.get(phase, 0.0) for timings in self.chunks)
            figures[f"{phase}_fps"] = self.frames / seconds if seconds else 0.0
        if self.postprocess:
            figures["postprocess_fps"] = self.frames / self.postprocess
        figures["end_to_end_fps"] = self.fps
        if len(self.latencies) > 1:
            percentiles = statistics.quantiles(self.latencies, n=100, method="inclusive")
            figures["chunk_p50_s"], figures["chunk_p99_s"] = percentiles[49], percentiles[98]
        return {name: round(value, 4) for name, value in figures.items()}

    def lines(self) -> str:
        """The same for a person."""
        s = self.summary()
        text = (
            f"first frame after {s['time_to_first_frame_s']:.2f} s (model loaded in {s['load_s']:.1f} s); "
            f"{s['end_to_end_fps']:.1f} FPS end to end, DiT alone {s['dit_fps']:.1f}, "
            f"decode alone {s['decode_fps']:.1f}"
        )
        if "postprocess_fps" in s:
            text += f", post-processing alone {s['postprocess_fps']:.1f}"
        if "chunk_p50_s" in s:
            text += f"; chunk p50 {1000 * s['chunk_p50_s']:.0f} ms, p99 {1000 * s['chunk_p99_s']:.0f} ms"
        return text
