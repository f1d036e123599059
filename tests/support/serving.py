"""Servers for tests: one whose worker is a thread with the small template model, and one as people start it."""

from __future__ import annotations

import asyncio
import json
import random
import string
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import torch

from flashdreams.recipes.template.config import PIPELINE_TEMPLATE, RUNNER_TEMPLATE
from flashdreams.serving.config import ServeConfig
from flashdreams.serving.link import FramesHandler, WorkerDied, WorkerError
from flashdreams.serving.server import Server, _bind, make_server
from flashdreams.serving.service import Service
from flashdreams.serving.worker import Worker

PROMPT = "a red circle moves right on a blue background"


class ThreadLink:
    """A worker in a thread of this process. It can be told to die, and its requests are kept."""

    def __init__(self, pipeline: Any) -> None:
        self.pipeline = pipeline
        self.epoch = 0
        self.alive = False
        self.asked: list[dict[str, Any]] = []
        self.dies_at: Callable[[dict[str, Any]], str | None] = lambda request: None
        """``before``: without having done anything; ``after``: with the frames sent."""

    async def start(self) -> dict[str, Any]:
        self.epoch += 1
        self.alive = True
        self._one = asyncio.Lock()
        self._answers: list[tuple[dict[str, Any], Any]] = []
        self._worker = Worker(self.pipeline, lambda message, payload: self._answers.append((message, payload)))
        return {"state": 1000, "free": 10_000_000, "pid": 0}

    async def ask(
        self, request: dict[str, Any], on_frames: FramesHandler | None = None, timeout: float | None = None
    ) -> dict[str, Any]:
        async with self._one:  # a test may ask too
            return await self._ask(request, on_frames)

    async def _ask(self, request: dict[str, Any], on_frames: FramesHandler | None) -> dict[str, Any]:
        self.asked.append(request)
        fate = self.dies_at(request)
        if fate == "before" or not self.alive:
            self.alive = False
            raise WorkerDied
        self._answers.clear()
        await asyncio.to_thread(self._worker.handle, request)
        for message, payload in self._answers:
            if payload is not None and on_frames is not None:
                on_frames(message, memoryview(payload.tobytes()))
        if fate == "after":
            self.alive = False
            raise WorkerDied
        answer = self._answers[-1][0]
        if "error" in answer:
            raise WorkerError(answer["error"], answer["message"])
        return answer

    async def stop(self, timeout: float = 5.0) -> None:
        self.alive = False


@dataclass
class Running:
    """A server that runs in a thread."""

    service: Service
    server: Server
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def request(
        self, path: str, body: bytes | dict[str, Any] | None = None, method: str | None = None, **headers: str
    ) -> tuple[int, Any]:
        """Status and body (read as JSON where it is) of an HTTP request."""
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        kind = {} if data is None else {"content-type": "application/json"}
        asked = Request(self.url + path, data, {**kind, **headers}, method=method)
        try:
            with urlopen(asked, timeout=30) as response:
                status, content, kind = response.status, response.read(), response.headers["content-type"]
        except HTTPError as error:
            status, content, kind = error.code, error.read(), error.headers["content-type"]
        return status, json.loads(content) if "json" in (kind or "") else content

    def metric(self, name: str) -> float:
        lines = self.request("/metrics")[1].decode().splitlines()
        return float(next(line.split()[-1] for line in lines if line.startswith(f"flashdreams_{name} ")))


@contextmanager
def running(config: ServeConfig, service: Service) -> Generator[Running]:
    """Serve in a thread until the block ends."""
    listening, failures = _bind(config), []
    server = make_server(config, service, failures)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        until(lambda: service.ready or failures, 300)
        assert not failures, failures
        yield Running(service, server, listening.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(60)
        listening.close()
        assert not thread.is_alive()


def until(condition: Callable[[], Any], seconds: float = 30.0) -> Any:
    """Wait for ``condition``, and return what it gives; a test that waits for ever has failed."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)
    return value


def template_pipeline() -> Any:
    """The template model, with a brightness that shows: as published it is a head that still has to learn."""
    pipeline = PIPELINE_TEMPLATE.setup(device="cpu")
    for name, parameter in pipeline.named_parameters():
        if "brightness" in name:
            parameter.normal_(generator=torch.Generator().manual_seed(0))
    return pipeline


def template_service(**settings: Any) -> Service:
    """The template model behind a thread."""
    config = ServeConfig(**{"port": 0, **settings})
    return Service(config, RUNNER_TEMPLATE, ThreadLink(template_pipeline()))


@contextmanager
def one_thread() -> Generator[None]:
    """Bit-exact equality is promised for the same number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


TYPES = ["create", "attach", "control", "prompt", "pause", "resume", "reset", "seed", "snapshot", "restore", "close",
         "webrtc_offer", "video"]  # fmt: skip


def junk(random_: random.Random) -> str:
    """A message that is nearly one, or not at all."""
    value: Any = random_.choice([None, True, -1, 1e308, 2**70, "", "\x00", "a" * 5000, [], {}, [[[]]], {"keys": "w"}])
    names = ["type", "v", "prompt", "seed", "control", "snapshot", "policy", "image", "controls", "sdp", "over", "x"]
    fields = {random_.choice(names): value for _ in range(random_.randrange(4))}
    text = json.dumps({"type": random_.choice([*TYPES, value]), **fields})
    kind = random_.randrange(4)
    if kind == 0:
        return text[: random_.randrange(len(text))]
    if kind == 1:
        return "".join(random_.choices(string.printable, k=random_.randrange(200)))
    if kind == 2:
        place = random_.randrange(len(text))
        return text[:place] + chr(random_.randrange(0xD800)) + text[place + 1 :]
    return text
