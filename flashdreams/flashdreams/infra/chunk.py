"""A chunk as it is handed out, and where it is decoded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Decoded:
    """A chunk's frames, uint8 ``[T, H, W, 3]`` (with a batch axis in front where prompts came as a list), and its
    latent, both on the CPU."""

    frames: Tensor
    latent: Tensor


class Promised(Protocol):
    """What is being made elsewhere."""

    def result(self) -> Decoded:
        """Waits for it; raises what went wrong."""
        ...


@dataclass(frozen=True)
class Made:
    """What is there already."""

    value: Decoded

    def result(self) -> Decoded:
        return self.value


@dataclass
class Chunk:
    """What one turn of the loop made.

    ``latent`` is ``[B, C, T, H, W]`` on the device. ``timings`` are seconds by phase: ``dit`` and ``decode``, and
    ``commit`` once it ran and, where chunks are decoded beside the next steps, another chunk was decoded.
    """

    index: int
    latent: Tensor
    decoded: Promised
    timings: dict[str, float] = field(default_factory=dict)

    @property
    def frames(self) -> Tensor:
        """uint8 ``[T, H, W, 3]`` on the CPU, with a batch axis in front where prompts came as a list. Waits for them
        where they are decoded elsewhere."""
        return self.decoded.result().frames

    @property
    def host_latent(self) -> Tensor:
        """The latent on the CPU, which waits for nothing that comes after it."""
        return self.decoded.result().latent

    def with_frames(self, frames: Tensor) -> Chunk:
        """The same chunk with others in place of its frames."""
        return replace(self, decoded=Made(Decoded(frames, self.host_latent)))


class Lane(Protocol):
    """Where chunks are decoded while the model goes on: a thread, and on a GPU a stream."""

    def start(self, work: Callable[[], Decoded], reads: Any) -> Promised:
        """Do ``work`` once the device has done all that it was asked for so far, beside all that it is asked for from
        now on. ``reads`` holds, at any depth, the tensors that it reads: their memory is not given to other work
        meanwhile, though ``work`` may let go of them."""
        ...

    def now(self) -> Any:
        """This moment of the device, as the caller's work on it goes."""
        ...

    def seconds(self, begin: Any, end: Any) -> float:
        """Between two moments; waits for the second."""
        ...


class InTurn:
    """Decodes at once: where there is no :class:`Lane`. Each phase waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self, work: Callable[[], Decoded], reads: Any) -> Made:
        return Made(work())

    def now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


def hand_over(chunks: Iterable[Chunk], take: Callable[[Chunk], None], *, behind: bool) -> None:
    """Give every chunk to ``take``.

    Args:
        behind: each only when the next one has been asked for, for chunks that are decoded meanwhile. The one that is
            held back is given also when an error or Ctrl-C ends the loop, unless ``take`` itself failed.
    """
    waiting: list[Chunk] = []
    failed = False

    def give() -> None:
        nonlocal failed
        try:
            take(waiting.pop(0))
        except Exception:
            failed = True
            raise

    try:
        for chunk in chunks:
            waiting.append(chunk)
            if not behind or len(waiting) > 1:
                give()
    finally:
        while waiting and not failed:
            give()


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors that ``value`` holds, at any depth, each once; modules, which belong to no rollout, left out."""
    tensors: dict[int, Tensor] = {}
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if id(each) in seen or isinstance(each, (str, bytes, int, float, type(None), torch.nn.Module)):
            continue
        seen.add(id(each))
        if isinstance(each, Tensor):
            tensors[id(each)] = each
        elif isinstance(each, dict):
            waiting += each.values()
        elif isinstance(each, (list, tuple, set)):
            waiting += each
        elif hasattr(each, "__dict__"):
            waiting += vars(each).values()
    return list(tensors.values())
