"""What each chunk takes, by phase: one line per chunk, and a trace for the usual viewers.

The pipeline's methods are wrapped when this is asked for; without it there is nothing to pay. One rollout at a time.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function
from tqdm import tqdm

from flashdreams.infra.errors import UserError
from flashdreams.infra.pipeline import StreamInferencePipeline

TRACE_CHUNKS = 8
"""Chunks in a trace; viewers cannot open that of a long run."""


@dataclass
class Span:
    """A phase of a chunk; ``begin`` and ``end`` are moments of the device (:class:`Clock`)."""

    phase: str
    begin: Any
    end: Any = None


class Clock:
    """Moments of a device: an event on the current stream of a GPU, so that measuring waits for nothing; else time."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self._device = device
        self._origin = self.now()

    def now(self) -> Any:
        """This moment."""
        if not self.cuda:
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, moment: Any) -> float:
        """Seconds since the clock was made."""
        if not self.cuda:
            return moment - self._origin
        moment.synchronize()
        return self._origin.elapsed_time(moment) / 1000


@dataclass
class Profiler:
    """Collects the phases of every chunk of ``pipeline`` and prints a line for each that is complete.

    Args:
        write: takes the lines; stderr by default, without disturbing a progress bar.
    """

    pipeline: StreamInferencePipeline
    trace: Path | None = None
    write: Callable[[str], None] = lambda line: tqdm.write(line, file=sys.stderr)
    _spans: dict[int, list[Span]] = field(default_factory=dict)
    _chunk: int = 0
    _decoded: int | None = None
    _tracing: Any = None
    _traced: int = 0

    def __post_init__(self) -> None:
        pipeline: Any = self.pipeline
        model: Any = pipeline.diffusion_model
        if self.trace is not None:
            check_trace(self.trace)
        self._clock = Clock(pipeline.device)
        # Wrapped on the instances, so that the classes and other pipelines are as they were.
        pipeline.encode_controls = self._timed(pipeline.encode_controls, "encode", lambda args: args[1])
        pipeline.decode = self._timed(pipeline.decode, "decode", lambda args: self._next_decoded())
        model.finalize = self._timed(model.finalize, "commit", lambda args: args[0])
        for expert in model.experts:
            expert.predict_flow = self._timed(expert.predict_flow, "step", lambda args: self._chunk)
            fused = expert.commit_and_predict_flow
            expert.commit_and_predict_flow = self._timed(fused, "commit+step", lambda args: self._chunk)
        generate = model.generate

        def begin(index: int, *args: Any, **kwargs: Any) -> Any:
            self._begin(index)
            return generate(index, *args, **kwargs)

        model.generate = begin

    def close(self) -> None:
        """Print what is left, and write the trace."""
        for chunk in sorted(self._spans):
            self._say(chunk)
        self._decoded = None
        self._stop_trace()

    def _timed(self, function: Callable[..., Any], phase: str, chunk: Callable[[tuple[Any, ...]], int]) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            span = Span(phase, self._clock.now())
            self._spans.setdefault(chunk(args), []).append(span)
            with record_function(phase):
                result = function(*args, **kwargs)
            span.end = self._clock.now()
            return result

        return timed

    def _begin(self, index: int) -> None:
        for chunk in sorted(self._spans):
            if chunk < index and self._complete(chunk):
                self._say(chunk)
        self._chunk = index
        if self._decoded is None:
            self._decoded = index
        if self.trace is not None:
            if self._tracing is None and not self._traced:
                self._start_trace()
            elif self._traced >= TRACE_CHUNKS:
                self._stop_trace()
            self._traced += 1

    def _complete(self, chunk: int) -> bool:
        """Whether it is decoded, and committed, by itself or together with a step of the next one."""
        own, following = (
            {span.phase for span in self._spans.get(each, ()) if span.end is not None} for each in (chunk, chunk + 1)
        )
        return ("commit" in own or "commit+step" in following) and ("decode" in own or self.pipeline.decoder is None)

    def _next_decoded(self) -> int:
        """Chunks are decoded in order, but maybe beside a later chunk's steps."""
        chunk = self._decoded or 0
        self._decoded = chunk + 1
        return chunk

    def _say(self, chunk: int) -> None:
        spans = [
            (span.phase, self._clock.seconds(span.begin), self._clock.seconds(span.end))
            for span in self._spans.pop(chunk)
            if span.end is not None
        ]
        self.write(line(chunk, spans, memory(self.pipeline.device)))

    def _start_trace(self) -> None:
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * self._clock.cuda
        self._tracing = torch.profiler.profile(activities=activities)
        self._tracing.start()

    def _stop_trace(self) -> None:
        if self._tracing is None:
            return
        tracing, self._tracing = self._tracing, None
        tracing.stop()
        tracing.export_chrome_trace(str(self.trace))
        self.write(f"trace of {self._traced} chunks: {self.trace} (open it in ui.perfetto.dev or chrome://tracing)")


def line(chunk: int, spans: list[tuple[str, float, float]], bytes_used: int) -> str:
    """One chunk's line. ``spans`` are phase, begin and end in seconds; overlap is the time that two phases share."""
    taken: dict[str, list[float]] = {}
    for phase, begin, end in spans:
        taken.setdefault(phase, []).append(1000 * (end - begin))
    busy, until = 0.0, float("-inf")
    for _, begin, end in sorted(spans, key=lambda span: span[1]):
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    steps = [f"commit+{fused:.1f}" for fused in taken.get("commit+step", ())]
    steps += [f"{step:.1f}" for step in taken.get("step", ())]
    parts = [f"{phase} {sum(taken[phase]):.1f}" for phase in ("encode",) if phase in taken]
    parts.append(f"steps {' '.join(steps)}".rstrip())
    parts += [f"{phase} {sum(taken[phase]):.1f}" for phase in ("commit", "decode") if phase in taken]
    overlap = sum(map(sum, taken.values())) - 1000 * busy
    return f"chunk {chunk}: {', '.join(parts)}, overlap {max(0.0, overlap):.1f} ms; memory {bytes_used / 2**20:.0f} MiB"


def memory(device: torch.device) -> int:
    """Bytes: the most that tensors took on a GPU so far, or what the process takes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return pages * os.sysconf("SC_PAGE_SIZE")


def check_trace(path: Path) -> None:
    """Refuse a place that cannot be written, before anything is generated."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        raise UserError(f"the trace {path} cannot be written: {error.strerror or error}") from None
