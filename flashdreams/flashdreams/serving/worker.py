"""The worker: a process that holds the model and does one thing at a time as it is told, over a pipe.

A request is a dict with ``op``. Each is answered with one dict at the end, with ``error`` and ``message`` where it
failed; ``step`` first sends a dict with ``frames`` and then their bytes, so that they are shown while the chunk is
committed. Whatever fails, the worker goes on with the other sessions; if it dies, :mod:`.link` starts another.
"""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from flashdreams.infra.load import load_pipeline
from flashdreams.serving.scene import Scene
from flashdreams.serving.steered import SteeredRollout, latent_digest

if TYPE_CHECKING:
    from flashdreams.infra.acceleration_config import AccelerationConfig
    from flashdreams.infra.config import PipelineConfig
    from flashdreams.infra.pipeline import StreamInferencePipeline


@dataclass(frozen=True)
class WorkerSpec:
    """What a worker serves."""

    pipeline: PipelineConfig
    acceleration: AccelerationConfig
    device: str = "auto"
    threads: int | None = None
    warm_up: bool = True


class Worker:
    """The model and its open rollouts by session number.

    Args:
        send: takes each answer, and the bytes of frames.
    """

    def __init__(self, pipeline: StreamInferencePipeline, send: Callable[[dict[str, Any], Any], None]) -> None:
        self.pipeline = pipeline
        self._send = send
        self._open: dict[int, SteeredRollout] = {}

    def handle(self, request: dict[str, Any]) -> None:
        """Do what ``request`` says and answer it."""
        try:
            answer = getattr(self, f"_op_{request['op']}")(request)
        except Exception as error:
            answer = {"error": _kind(error), "message": _message(error)}
            self._forget(request)
        self._send(answer, None)

    def measure(self) -> dict[str, Any]:
        """Make the first chunk of a session that nobody asked for; what a session holds, and what is left for more."""
        config = self.pipeline.config
        scene = Scene(prompt="", seed=0, height=config.height, width=config.width)
        begun = time.perf_counter()
        try:
            rollout = SteeredRollout.open(self.pipeline, scene)
            rollout.step([], [])
            rollout.commit()
            state = rollout.num_bytes
            rollout.close()
        except Exception as error:  # such as a model that needs an image
            return {"state": None, "note": f"no session was tried beforehand: {_message(error)}"}
        del rollout
        return {"state": state, "free": free_bytes(self.pipeline.device), "seconds": time.perf_counter() - begun}

    def _forget(self, request: dict[str, Any]) -> None:
        """Leave nothing behind of a rollout that failed: the next one may need its memory."""
        if request["op"] in ("open", "resume", "step") and (rollout := self._open.pop(request["session"], None)):
            rollout.close()
        gc.collect()
        if self.pipeline.device.type == "cuda":
            torch.cuda.empty_cache()

    def _op_ping(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"sessions": sorted(self._open), "free": free_bytes(self.pipeline.device)}

    def _begin(self, number: int, begin: Callable[[], SteeredRollout]) -> dict[str, Any]:
        if old := self._open.pop(number, None):
            old.close()
        rollout = self._open[number] = begin()
        return {"bytes": rollout.num_bytes, "frame": rollout.next_frame, **self._next(rollout)}

    @staticmethod
    def _next(rollout: SteeredRollout) -> dict[str, Any]:
        return {"next_chunk": rollout.next_chunk, "next_controls": rollout.next_controls}

    def _op_open(self, request: dict[str, Any]) -> dict[str, Any]:
        return self._begin(request["session"], lambda: SteeredRollout.open(self.pipeline, request["scene"]))

    def _op_resume(self, request: dict[str, Any]) -> dict[str, Any]:
        path = Path(request["path"])
        return self._begin(request["session"], lambda: SteeredRollout.resume(self.pipeline, path))

    def _op_step(self, request: dict[str, Any]) -> dict[str, Any]:
        rollout = self._open[request["session"]]
        step = rollout.step(request["events"], request["rows"])
        frames = step.chunk.frames.numpy()
        facts = {
            "frames": frames.shape, "chunk": step.chunk.index, "first_frame": step.first_frame,
            "refused": step.refused, "timings": dict(step.chunk.timings), "digest": latent_digest(step.chunk),
        }  # fmt: skip
        self._send(facts, frames)
        return {"commit": rollout.commit(), **self._next(rollout)}

    def _op_save(self, request: dict[str, Any]) -> dict[str, Any]:
        self._open[request["session"]].save(Path(request["path"]))
        return {}

    def _op_close(self, request: dict[str, Any]) -> dict[str, Any]:
        if rollout := self._open.pop(request["session"], None):
            rollout.close()
        return {}


def free_bytes(device: torch.device) -> int | None:
    """Memory that new sessions may use."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as file:
            lines = dict(line.split(":", 1) for line in file)
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError):
        return None
    with suppress(OSError, ValueError):  # of a container; "max" is no number, and means none
        group = Path("/sys/fs/cgroup")
        free = min(free, int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return free


def serve_pipe(connection: Connection, spec: WorkerSpec) -> None:
    """The process: load the model, say so, and do as told until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's, which ends this process in good order
    if spec.threads is not None:
        torch.set_num_threads(spec.threads)

    def send(message: dict[str, Any], payload: Any) -> None:
        connection.send(message)
        if payload is not None:
            connection.send_bytes(payload.reshape(-1).data)

    try:
        try:
            begun = time.perf_counter()
            pipeline = load_pipeline(spec.pipeline, device=spec.device, acceleration=spec.acceleration)
            worker = Worker(pipeline, send)
            facts: dict[str, Any] = worker.measure() if spec.warm_up else {"state": None}
        except Exception as error:
            send({"error": "load", "message": _message(error)}, None)
            return
        ready = {"pid": os.getpid(), "device": str(pipeline.device), "load": time.perf_counter() - begun}
        send(ready | facts, None)
        while (request := connection.recv())["op"] != "leave":
            worker.handle(request)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the server is gone


def _kind(error: Exception) -> str:
    out_of_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)
    return "memory" if out_of_memory else "input" if isinstance(error, ValueError) else "internal"


def _message(error: Exception) -> str:
    return f"{error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"[:500]
