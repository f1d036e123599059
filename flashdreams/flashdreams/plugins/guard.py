"""Keeping torch out while plugins are listed."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Generator


class TorchGuard:
    """A finder that refuses torch to the thread that made it, and remembers being asked."""

    def __init__(self) -> None:
        self.asked = False
        self._thread = threading.get_ident()

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Find nothing, so that the next finder is asked; for torch, fail."""
        if name.partition(".")[0] == "torch" and threading.get_ident() == self._thread:
            self.asked = True
            raise ImportError("torch is not imported while runners are listed", name=name)


@contextlib.contextmanager
def without_torch() -> Generator[TorchGuard]:
    """Inside, importing torch fails (unless it is there already), so that a listing stays quick."""
    guard = TorchGuard()
    if "torch" in sys.modules:
        yield guard
        return
    sys.meta_path.insert(0, guard)
    try:
        yield guard
    finally:
        sys.meta_path.remove(guard)
