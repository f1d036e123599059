"""Listing what is installed: a table, or JSON. No torch here, whatever a plugin does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flashdreams.infra.errors import UserError
from flashdreams.plugins.guard import without_torch
from flashdreams.plugins.registry import PluginEntry, PluginError, discover_postprocessors, discover_runners
from flashdreams.scripts.console import columns, warn, write_file

USAGE = """usage: flashdreams list [--json]

Lists the installed runners and post-processors, one a line. --json gives an object with a list of objects for each."""


@dataclass(frozen=True)
class Listed:
    """A runner or a post-processor that can be used, as far as a listing can tell."""

    entry: PluginEntry
    description: str


def listed_runners() -> list[Listed]:
    """Every runner that loads without torch; one that cannot be used is a warning and left out."""
    return _listed(discover_runners())


def listed_postprocessors() -> list[Listed]:
    """Likewise the post-processors."""
    return _listed(discover_postprocessors())


def _listed(entries: Mapping[str, PluginEntry]) -> list[Listed]:
    found = []
    for entry in entries.values():
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
    return _columns(runners)


def main(words: Sequence[str], program: str) -> int:
    """``flashdreams list [--json]``."""
    if {"-h", "--help"} & set(words):
        print(USAGE)
        return 0
    if unknown := [word for word in words if word != "--json"]:
        raise UserError(f"{unknown[0]!r} means nothing to {program}; it takes --json or nothing")
    runners, postprocessors = listed_runners(), listed_postprocessors()
    if "--json" in words:
        found = {"runners": list(map(_as_json, runners)), "postprocessors": list(map(_as_json, postprocessors))}
        write_file(json.dumps(found, indent=2, ensure_ascii=False) + "\n")
        return 0
    print(table(runners))
    if postprocessors:
        print(f"\nPost-processors, for --postprocess NAME:\n{_columns(postprocessors)}")
    return 0


def _columns(listed: Sequence[Listed]) -> str:
    return columns((each.entry.slug, each.description) for each in listed)


def _as_json(listed: Listed) -> dict[str, Any]:
    entry = listed.entry
    return {
        "slug": entry.slug,
        "description": listed.description,
        "config": entry.reference,
        "source": entry.source,
    }
