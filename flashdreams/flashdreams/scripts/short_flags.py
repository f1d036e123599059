"""Short forms of flags of the nested config that people type daily. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Short:
    """A short flag: what it stands for, and its value where the next word is none."""

    flag: str
    default: str
    is_value: Callable[[str], bool]


SHORT_FLAGS = {
    "--compile": Short("--acceleration.compile", "on", lambda word: word in ("on", "off", "auto")),
    "--profile": Short(
        "--acceleration.profile", "lines", lambda word: word == "lines" or word.endswith((".json", ".json.gz"))
    ),
}


def expand(words: Sequence[str]) -> list[str]:
    """``words`` with every short flag written out."""
    out: list[str] = []
    waiting: Short | None = None
    for word in words:
        if waiting is not None:
            out.append(word if waiting.is_value(word) else waiting.default)
            taken, waiting = waiting.is_value(word), None
            if taken:
                continue
        name, equals, value = word.partition("=")
        if name not in SHORT_FLAGS:
            out.append(word)
        elif equals:
            out.append(f"{SHORT_FLAGS[name].flag}={value}")
        else:
            waiting = SHORT_FLAGS[name]
            out.append(waiting.flag)
    return out + ([] if waiting is None else [waiting.default])
