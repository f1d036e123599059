"""The server's end of the pipe to a worker: start it, ask it, notice its death, replace it."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Protocol

START_TIMEOUT = 3600.0
"""Seconds; loading may download many gigabytes."""


class WorkerDied(Exception):
    """The worker is gone, and with it the answer."""


class WorkerError(Exception):
    """The worker could not do what it was asked, and goes on; ``kind`` is ``input``, ``memory`` or ``internal``."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


FramesHandler = Callable[[dict[str, Any], memoryview], None]


class Link(Protocol):
    """A worker as the scheduler sees it. ``epoch`` counts the workers there were: state of an older one is lost."""

    epoch: int

    @property
    def alive(self) -> bool: ...
    async def start(self) -> dict[str, Any]: ...
    async def ask(
        self, request: dict[str, Any], on_frames: FramesHandler | None = None, timeout: float | None = None
    ) -> dict[str, Any]: ...
    async def stop(self, timeout: float = 5.0) -> None: ...


class ProcessLink:
    """A worker in a process of its own. One request at a time.

    Args:
        target: what the process runs, given its end of the pipe and ``spec``.
    """

    def __init__(self, target: Callable[..., None], spec: Any) -> None:
        self._target, self._spec = target, spec
        self._context = multiprocessing.get_context("spawn")
        self._threads = ThreadPoolExecutor(1, "worker-pipe")
        self._process: Any = None
        self._connection: Any = None
        self._answers: asyncio.Queue[tuple[dict[str, Any], memoryview | None] | None] = asyncio.Queue()
        self.epoch = 0

    @property
    def pid(self) -> int | None:
        """Of the process there is now."""
        return None if self._process is None else self._process.pid

    @property
    def alive(self) -> bool:
        """Whether there is a process that has not ended."""
        return self._process is not None and self._process.is_alive()

    async def start(self) -> dict[str, Any]:
        """A new worker, ready; what it says of itself.

        Raises:
            WorkerError: it cannot load the model.
            WorkerDied: it died of it.
        """
        await self.stop(timeout=0)
        self.epoch += 1
        self._connection, theirs = self._context.Pipe()
        self._process = self._context.Process(
            target=self._target, args=(theirs, self._spec), name="flashdreams-worker", daemon=True
        )
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._threads, self._process.start)
        theirs.close()
        self._answers = asyncio.Queue()
        reader = threading.Thread(target=_read, args=(self._connection, loop, self._answers), daemon=True)
        reader.start()
        return await self._answer(None, START_TIMEOUT)

    async def ask(
        self, request: dict[str, Any], on_frames: FramesHandler | None = None, timeout: float | None = None
    ) -> dict[str, Any]:
        """The answer to ``request``; frames that come before it go to ``on_frames``.

        Raises:
            WorkerError: it could not be done.
            WorkerDied: the worker is gone, or was ended because it took longer than ``timeout``.
        """
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._threads, self._connection.send, request)
        except (OSError, ValueError, AttributeError):
            raise WorkerDied from None
        return await self._answer(on_frames, timeout)

    async def _answer(self, on_frames: FramesHandler | None, timeout: float | None) -> dict[str, Any]:
        try:
            async with asyncio.timeout(timeout):
                while True:
                    answer = await self._answers.get()
                    if answer is None:
                        raise WorkerDied
                    message, payload = answer
                    if payload is not None:
                        if on_frames is not None:
                            on_frames(message, payload)
                    elif "error" in message:
                        raise WorkerError(message["error"], message["message"])
                    else:
                        return message
        except TimeoutError:
            await self.stop(timeout=0)
            raise WorkerDied from None

    async def stop(self, timeout: float = 5.0) -> None:
        """End the process: closing the pipe lets it leave by itself, within ``timeout`` seconds."""
        process, connection = self._process, self._connection
        self._process = self._connection = None
        if process is None:
            return
        if timeout == 0:
            process.kill()
        # A reader blocked in the pipe holds it open; only the end of the process wakes it.
        loop = asyncio.get_running_loop()
        with suppress(OSError):
            await loop.run_in_executor(self._threads, connection.send, {"op": "leave"})
        await asyncio.to_thread(process.join, timeout or 10.0)
        if process.is_alive():
            process.kill()
            await asyncio.to_thread(process.join, 10.0)
        connection.close()


def _read(connection: Any, loop: asyncio.AbstractEventLoop, answers: asyncio.Queue[Any]) -> None:
    """A thread: hand what comes over the pipe to the event loop, and ``None`` at its end."""
    try:
        while True:
            message = connection.recv()
            payload = memoryview(connection.recv_bytes()) if "frames" in message else None
            loop.call_soon_threadsafe(answers.put_nowait, (message, payload))
    except (EOFError, OSError, ValueError, TypeError):
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(answers.put_nowait, None)
