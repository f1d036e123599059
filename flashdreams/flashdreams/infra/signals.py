"""Signals that end a run."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager


@contextmanager
def handled_by(handler: Callable[..., object], numbers: Iterable[int]) -> Generator[None]:
    """Within it ``handler`` is called for these signals; outside of the main thread, which alone may set handlers,
    nothing changes."""
    try:
        previous = {number: signal.signal(number, handler) for number in numbers}
    except ValueError:
        yield
        return
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


@contextmanager
def terminate_as_interrupt() -> Generator[None]:
    """SIGTERM ends the run as Ctrl-C does, so that its files are finished."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with handled_by(interrupt, [signal.SIGTERM]):
        yield


@contextmanager
def interrupt_later() -> Generator[None]:
    """Ctrl-C, and SIGTERM where it counts as such, wait for the end of the block; a second one does not."""
    came = False

    def remember(*_: object) -> None:
        nonlocal came
        if came:
            raise KeyboardInterrupt
        came = True
        print("interrupted: what was generated is being finished; once more stops at once", file=sys.stderr)

    numbers = [number for number in (signal.SIGINT, signal.SIGTERM) if callable(signal.getsignal(number))]
    with handled_by(remember, numbers):
        yield
    if came:
        raise KeyboardInterrupt
