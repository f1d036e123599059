"""Controls as people write them: words and keys with the number of frames each is held."""

from __future__ import annotations

import re
from pathlib import Path

from flashdreams.core.controls.recording import SUFFIX, load_controls
from flashdreams.core.controls.spec import ControlSpec
from flashdreams.core.controls.types import Control, ControlError

DEFAULT_HOLD = 16
"""Frames: about a second."""
MAX_HOLD = 1_000_000
TEXT_SUFFIXES = (".txt", ".csv", ".json")
MAX_TEXT = 200_000
"""Bytes of a file of words."""


def read_controls(source: str, takes: ControlSpec) -> list[Control | None]:
    """One control per frame, from what stands after ``--control``: words, a file of them, or a recording.

    Raises:
        ControlError: with what is not understood, or the file that cannot be read.
    """
    if Path(source).suffix == SUFFIX and "\n" not in source:
        recorded = load_controls(source).controls
        return [_checked(control, takes, f"{source}, frame {frame}") for frame, control in enumerate(recorded)]
    return parse_script(text_or_file(source), takes)


def parse_script(text: str, takes: ControlSpec) -> list[Control | None]:
    """``"right:24 none:8 w+d"`` -> one control per frame. Keys held together have a plus between them; ``none`` is
    nothing; what has no number of frames is held for 16."""
    controls: list[Control | None] = []
    for item in re.split(r"[\s,;]+", text.strip()):
        word, separator, count = item.partition(":")
        if separator and not (count.isdecimal() and len(count) < 8 and 0 < int(count) <= MAX_HOLD):
            raise ControlError(
                f"control {item!r:.80}: {count!r:.40} is not a number of frames; write for instance '{word or 'w'}:24'"
            )
        held = None if word.lower() == "none" and "none" not in takes.words else takes.validate(word)
        controls += [held] * (int(count) if separator else DEFAULT_HOLD)
    return controls


def text_or_file(source: str) -> str:
    """``source``, or what the file of this name holds where it looks like the name of a text file."""
    looks_like_file = len(source) < 4096 and "\n" not in source and Path(source).suffix in TEXT_SUFFIXES
    if not looks_like_file:
        return source
    try:
        if (size := Path(source).stat().st_size) > MAX_TEXT:
            raise ControlError(f"control file {source} has {size} bytes; at most {MAX_TEXT} are read")
        return Path(source).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        if isinstance(error, ControlError):
            raise
        raise ControlError(f"control file {source} cannot be read as text: {error}") from None


def _checked(control: Control | None, takes: ControlSpec, where: str) -> Control | None:
    try:
        return takes.validate(control)
    except ControlError as error:
        raise ControlError(f"{where}: {error}") from None
