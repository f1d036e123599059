"""Run records as the start of a run: reading one, and saying where this machine differs. No torch here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from flashdreams.config import ConfigError, apply_dict, derive_config
from flashdreams.infra.config import RunnerConfig
from flashdreams.infra.errors import UserError

C = TypeVar("C", bound=RunnerConfig)


@dataclass(frozen=True)
class RunRecord:
    """What a record says about the run it stands beside."""

    path: Path
    slug: str
    config: Mapping[str, Any]
    seed: int
    environment: Mapping[str, Any]
    checkpoint: Mapping[str, Any]
    inputs: Mapping[str, Any]

    def apply(self, config: C) -> C:
        """``config`` as it was in that run, writing to ``<record>-replay.mp4``, so that the recorded video stays."""
        try:
            config = derive_config(apply_dict(config, self.config), seed=self.seed)
        except ConfigError as error:
            raise UserError(f"{self.path} does not fit this version of {self.slug}: {error}") from None
        return derive_config(config, output=self.path.with_name(f"{self.path.stem}-replay.mp4"))


def read_record(path: Path) -> RunRecord:
    """The record in a file.

    Raises:
        UserError: the file cannot be read, or is no run record.
    """
    text = read_text(path, "--replay")
    try:
        record = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise UserError(f"--replay {path} is no run record, since it is not valid JSON: {error}") from None
    if not isinstance(record, dict):
        record = {}
    for key, kind in {"slug": str, "config": dict, "seed": int}.items():
        if not isinstance(record.get(key), kind):
            raise UserError(
                f"--replay {path} is no run record: it has no {key!r} of the right kind; "
                "give the .json that stands beside a video"
            )
    rest = {key: record.get(key) for key in ("environment", "checkpoint", "inputs")}
    return RunRecord(
        path, record["slug"], record["config"], record["seed"],
        **{key: value if isinstance(value, dict) else {} for key, value in rest.items()},
    )  # fmt: skip


def read_text(path: Path, flag: str) -> str:
    """The text of a small file that a flag names."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise UserError(f"{flag} {path} cannot be read as text: {error}") from None


def differences(recorded: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """``"name: was x, is y"`` for each name whose value changed or is in one of the two only."""
    names = [*recorded, *(name for name in current if name not in recorded)]
    return [
        f"{name}: was {recorded.get(name, 'not recorded')}, is {current.get(name, 'not known')}"
        for name in names
        if recorded.get(name) != current.get(name)
    ]


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON number")
