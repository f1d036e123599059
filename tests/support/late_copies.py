"""Copies to a device that come as late as they may, and what must never happen on the way."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(eq=False)
class Moment:
    """A copy, which is done when it is waited for; or a mark, when ``target`` is ``None``."""

    target: Tensor | None = None
    source: Tensor | None = None
    done: bool = False


class LateCopies:
    """Stands in for a device with streams. What is copied is rubbish until somebody waits for it, so that a block that
    computes too early computes nonsense. Memory that is still read must not be written again.

    ``log`` holds what happened: ``copy`` and ``wait`` with the address of the memory in the CPU, and ``mark``.
    """

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []
        self._readers: dict[int, Moment | None] = {}
        """By address of a slot: the mark after its last use; ``None`` while it is in use."""

    def memory(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def start(self, target: Tensor, source: Tensor, after: Moment) -> Moment:
        slot = target.data_ptr()
        if slot in self._readers:
            last = self._readers[slot]
            assert last is not None, "a block is copied over the one that runs"
            assert after is last, "a copy does not wait for the last reader of the memory"
        self.log.append(("copy", source.data_ptr()))
        target.fill_(255)  # not a number, in every floating-point format
        return Moment(target, source)

    def wait(self, moment: Moment) -> None:
        assert moment.target is not None
        assert moment.source is not None
        if not moment.done:
            moment.target.copy_(moment.source)
            moment.done = True
        self.log.append(("wait", moment.source.data_ptr()))
        self._readers[moment.target.data_ptr()] = None

    def mark(self) -> Moment:
        mark = Moment(done=True)
        self.log.append(("mark", 0))
        self._readers = {slot: mark if last is None else last for slot, last in self._readers.items()}
        return mark
