"""Notices: what a person should know but need not act on, said once and never silently skipped."""

from __future__ import annotations

import sys
import threading

_said: set[str] = set()
_lock = threading.Lock()


def say_once(message: str) -> None:
    """Print ``message`` as one line on stderr, the first time this process is given it."""
    with _lock:
        if message in _said:
            return
        _said.add(message)
    print(message, file=sys.stderr, flush=True)


def reset() -> None:
    """Forget what was said (tests)."""
    with _lock:
        _said.clear()
