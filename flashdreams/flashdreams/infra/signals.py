"""Signals that end a run."""

from __future__ import annotations

import signal
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
