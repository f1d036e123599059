"""The record of a session: what it began with, and what was said to it before each chunk. Enough to make it again.

JSON, one object a line: the first says what this is, the others are the server's own messages ``begun``, ``chunk`` and
``snapshot``, in order. Controls are kept frame by frame, as they were consumed, so a replay needs no clock.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FORMAT = "flashdreams-session-1"
KEPT = {
    "begun": ("type", "generation", "chunk", "snapshot", "scene"),
    "chunk": ("type", "generation", "chunk", "events", "controls", "refused", "digest"),
    "snapshot": ("type", "snapshot", "chunk"),
}
MAX_LINE = 2**27
"""Bytes; the first line may hold an image."""


class RecordingError(ValueError):
    """A file that is no record of a session, or a damaged one."""


class SessionWriter:
    """Writes a record as the session goes on; what is written stays readable, whenever the process ends."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115 (closed by close)

    def begin(self, hello: Mapping[str, Any], image: bytes | None = None) -> None:
        """Say what model it is, and the image file that the session began with."""
        facts = {"format": FORMAT, "model": hello["model"], "fps": hello["fps"], "server": hello["server"]}
        self._line(facts | {"image": None if image is None else base64.b64encode(image).decode()})

    def add(self, message: Mapping[str, Any]) -> None:
        """Keep what is needed of a server's message."""
        if message["type"] in KEPT:
            self._line({name: message[name] for name in KEPT[message["type"]]})

    def close(self) -> None:
        self._file.close()

    def _line(self, value: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(value, allow_nan=False) + "\n")
        self._file.flush()


@dataclass(frozen=True)
class SessionRecord:
    """What was read: the model, and the messages in order."""

    model: str
    fps: float
    image: bytes | None
    messages: list[dict[str, Any]] = field(default_factory=list)


def read_session(path: str | os.PathLike[str]) -> SessionRecord:
    """Read a record. A last line that was cut short is left out.

    Raises:
        RecordingError: it cannot be read, or is none.
    """
    lines = _lines(Path(path))
    first = next(lines, {})
    if first.get("format") != FORMAT:
        raise RecordingError(f"{path} is no record of a session: its format is {first.get('format')!r:.40}")
    image = first.get("image")
    try:
        known = None if image is None else base64.b64decode(image, validate=True)
        return SessionRecord(first["model"], float(first["fps"]), known, list(lines))
    except (KeyError, TypeError, ValueError) as error:
        raise RecordingError(f"{path} is damaged: {error}") from None


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with path.open(encoding="utf-8") as file:
            number = 0
            while line := file.readline(MAX_LINE):
                number += 1
                try:
                    value = json.loads(line)
                except (ValueError, RecursionError) as error:
                    if not line.endswith("\n") and number > 1:
                        return
                    raise RecordingError(f"{path}, line {number} is not JSON: {error}") from None
                if not isinstance(value, dict) or (number > 1 and value.get("type") not in KEPT):
                    raise RecordingError(f"{path}, line {number} is no part of a session")
                yield value
    except (OSError, UnicodeDecodeError) as error:
        raise RecordingError(f"{path} cannot be read: {error}") from None
