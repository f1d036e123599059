"""Chunks decoded while the model goes on: in a thread, and on a GPU on a stream of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from flashdreams.infra.chunk import Decoded, tensors_in


class Order(Protocol):
    """In what order a device does what several threads ask of it."""

    def mark(self) -> Any:
        """The moment when all that the calling thread asked for so far is done."""
        ...

    def lend(self, tensors: Sequence[torch.Tensor]) -> None:
        """See to it that their memory is not given to other work while what runs :meth:`beside` still reads it, even
        where nobody holds them any more."""
        ...

    def beside(self, moment: Any) -> Any:
        """Context in which work begins after ``moment``, and not after what others ask for later; at its end it is
        done."""
        ...

    def seconds(self, begin: Any, end: Any) -> float:
        """Between two moments."""
        ...


class HostOrder:
    """For devices whose work is done when the call returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def lend(self, tensors: Sequence[torch.Tensor]) -> None:
        """Who reads a tensor here holds it."""

    @contextmanager
    def beside(self, moment: float) -> Generator[None]:
        yield

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


class CudaOrder:
    """A GPU: the work of the thread goes to a stream of its own, and waits for events of others."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def lend(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(self.stream)

    @contextmanager
    def beside(self, moment: torch.cuda.Event) -> Generator[None]:
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            self.stream.wait_event(moment)
            try:
                yield
            finally:  # after an error too: what is read must not be given away before
                self.stream.synchronize()

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return begin.elapsed_time(end) / 1000


class DecodeLane:
    """A :class:`~flashdreams.infra.chunk.Lane`: one chunk after the other, in a thread.

    Memory: what is read was allocated on the caller's stream, and would be free for new work of it as soon as nobody
    holds it, though this one still reads. So it is lent to this stream. It is not held: a decoder replaces its states
    as it goes, and would need room for them twice. What the thread allocates belongs to its own stream.
    """

    def __init__(self, device: torch.device, order: Order | None = None) -> None:
        self._order = order or (CudaOrder(device) if device.type == "cuda" else HostOrder())
        threads = torch.get_num_threads()  # a setting of each thread, which compiled code is made for
        self._pool = ThreadPoolExecutor(1, "decode", lambda: torch.set_num_threads(threads))

    def start(self, work: Callable[[], Decoded], reads: Any) -> Future[Decoded]:
        self._order.lend(tensors_in(reads))
        return self._pool.submit(self._run, work, self._order.mark())

    def now(self) -> Any:
        return self._order.mark()

    def seconds(self, begin: Any, end: Any) -> float:
        return self._order.seconds(begin, end)

    def _run(self, work: Callable[[], Decoded], moment: Any) -> Decoded:
        try:
            with torch.no_grad(), self._order.beside(moment):
                return work()
        except StopIteration as error:  # would end the loop of whoever asks for it
            raise RuntimeError("the decoder raised StopIteration") from error
