"""Copies of weights from the CPU's memory to a device, in order with the device's other work."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch import Tensor

from flashdreams.core.notices import say_once


class Copies(Protocol):
    """How a device copies while it computes. Marks are moments in the order of its work."""

    def memory(self, size: int) -> Tensor:
        """``size`` bytes of the CPU's memory that the device can read by itself."""
        ...

    def start(self, target: Tensor, source: Tensor, after: Any) -> Any:
        """Ask for a copy once the moment ``after`` has come; returns the moment when it is done."""
        ...

    def wait(self, moment: Any) -> None:
        """Nothing that is asked for from now on begins before ``moment``."""
        ...

    def mark(self) -> Any:
        """The moment when all that was asked for so far, copies apart, is done."""
        ...


class DirectCopies:
    """Copies that are done when they are asked for: for devices without streams."""

    def memory(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def start(self, target: Tensor, source: Tensor, after: Any) -> None:
        target.copy_(source)

    def wait(self, moment: Any) -> None:
        pass

    def mark(self) -> None:
        return None


class CudaCopies:
    """Copies on a stream of their own, beside the work on the current one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def memory(self, size: int) -> Tensor:
        return pinned(size)

    def start(self, target: Tensor, source: Tensor, after: torch.cuda.Event) -> torch.cuda.Event:
        self.stream.wait_event(after)
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
        return self.stream.record_event()

    def wait(self, moment: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self.device).wait_event(moment)

    def mark(self) -> torch.cuda.Event:
        return torch.cuda.current_stream(self.device).record_event()


def pinned(size: int) -> Tensor:
    """``size`` bytes that stay where they are, so that a device reads them at full speed. PyTorch's own pinned memory
    rounds up to a power of two, which would take half as much again."""
    memory = torch.empty(size, dtype=torch.uint8)
    runtime: Any = torch.cuda.cudart()
    if size and int(runtime.cudaHostRegister(memory.data_ptr(), size, 0)) != 0:
        say_once("the system pins no more memory (see ulimit -l); offloaded blocks are copied more slowly")
    elif size:
        weakref.finalize(memory, runtime.cudaHostUnregister, memory.data_ptr())
    return memory
