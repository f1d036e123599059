"""Listing what is installed: a table, or JSON. No torch here, whatever a plugin does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flashdreams.infra.errors import UserError
from flashdreams.plugins.guard import without_torch
from flashdreams.plugins.registry import PluginError, RunnerEntry, discover_runners
from flashdreams.scripts.console import columns, warn, write_file

USAGE = "usage: flashdreams list [--json]\n\nLists the installed runners, one a line; --json gives a list of objects."


@dataclass(frozen=True)
class Listed:
    """A runner that can be used, as far as a listing can tell."""

    entry: RunnerEntry
    description: str


def listed_runners() -> list[Listed]:
    """Every runner that loads without torch; one that cannot be used is a warning and left out."""
    found = []
    for entry in discover_runners().values():
        with without_torch() as guard:
            try:
                description = entry.description()
            except PluginError as error:
                if not guard.asked:
                    warn(str(error))
                    continue
                description = ""
                warn(f"plugin {entry.slug!r} ({entry.reference}) imports torch, so it is listed without description")
        found.append(Listed(entry, " ".join(str(description).split())))
    return found


def table(runners: Sequence[Listed]) -> str:
    """One line for each runner: slug and description."""
    if not runners:
        return "No runner is installed; `pip install` a plugin, or name one in FLASHDREAMS_RUNNER_CONFIGS."
    return columns((runner.entry.slug, runner.description) for runner in runners)


def main(words: Sequence[str], program: str) -> int:
    """``flashdreams list [--json]``."""
    if {"-h", "--help"} & set(words):
        print(USAGE)
        return 0
    if unknown := [word for word in words if word != "--json"]:
        raise UserError(f"{unknown[0]!r} means nothing to {program}; it takes --json or nothing")
    runners = listed_runners()
    if "--json" in words:
        write_file(json.dumps([_as_json(runner) for runner in runners], indent=2, ensure_ascii=False) + "\n")
    else:
        print(table(runners))
    return 0


def _as_json(runner: Listed) -> dict[str, Any]:
    entry = runner.entry
    return {
        "slug": entry.slug,
        "description": runner.description,
        "config": entry.reference,
        "source": entry.source,
    }
