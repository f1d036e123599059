"""What a training writes down: JSON lines, and TensorBoard's files where that is installed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

FILE = "metrics.jsonl"


class Journal:
    """Lines of ``folder/metrics.jsonl``.

    Args:
        after: where a training goes on; lines of later iterations, which it will make again, are removed.
    """

    def __init__(self, folder: Path, after: int | None = None) -> None:
        path = folder / FILE
        kept = []
        if after is not None and path.exists():
            kept = [line for line in path.read_text(encoding="utf-8").splitlines() if _iteration(line) <= after]
        path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        self._file = path.open("a", encoding="utf-8")
        self._board: Any = None
        if importlib.util.find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=None if after is None else after + 1)

    def write(self, kind: str, iteration: int, values: dict[str, float]) -> None:
        """One line; ``kind`` is ``train`` or ``eval``."""
        line = {"kind": kind, "iteration": iteration} | values
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(f"{kind}/{name}", value, iteration)

    def close(self) -> None:
        """Everything is on disk."""
        self._file.close()
        if self._board is not None:
            self._board.close()


def _iteration(line: str) -> float:
    try:
        return json.loads(line)["iteration"]
    except (ValueError, KeyError, TypeError):  # cut off in the middle by whatever ended the training
        return float("inf")
