"""Signals that end a run."""

from __future__ import annotations

import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def terminate_as_interrupt() -> Generator[None]:
    """SIGTERM ends the run as Ctrl-C does, so that its files are finished."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    try:
        previous = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not the main thread, which alone may set handlers
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


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
    try:
        previous = {number: signal.signal(number, remember) for number in numbers}
    except ValueError:  # not the main thread, which alone may set handlers
        yield
        return
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if came:
        raise KeyboardInterrupt
