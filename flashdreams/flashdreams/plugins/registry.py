"""The registry of plugins: entry points and environment variables. Finding them imports none. No torch here."""

from __future__ import annotations

import importlib.metadata
import os
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from flashdreams.config.fields import nearest
from flashdreams.plugins.entry import Kind, PluginEntry, PluginError, PluginWarning

ENTRY_POINT_GROUP = "flashdreams.runner_configs"
"""An entry point's name is a slug; its value is ``module:attr``, a RunnerConfig or a mapping slug -> RunnerConfig."""
ENV_VAR = "FLASHDREAMS_RUNNER_CONFIGS"
"""``slug=module:attr,slug2=module:attr``, for plugins in development; goes before entry points."""
RUNNERS = Kind("runner", ENTRY_POINT_GROUP, ENV_VAR, "RunnerConfig", name="runner_name", mark="pipeline")
POSTPROCESSORS = Kind(
    "post-processor", "flashdreams.postprocessors", "FLASHDREAMS_POSTPROCESSORS", "PostprocessorConfig",
    name="name", mark="output_size",
)  # fmt: skip
REWARDS = Kind("reward", "flashdreams.rewards", "FLASHDREAMS_REWARDS", "RewardConfig", name="name", mark="has_prompts")


def discover_runners() -> dict[str, PluginEntry]:
    """Every slug that is installed, in alphabetical order, none of them imported."""
    return _discover(RUNNERS)


def discover_postprocessors() -> dict[str, PluginEntry]:
    """Every post-processor that is installed, in alphabetical order, none of them imported."""
    return _discover(POSTPROCESSORS)


def discover_rewards() -> dict[str, PluginEntry]:
    """Every reward that is installed, in alphabetical order, none of them imported."""
    return _discover(REWARDS)


def get_runner(slug: str) -> Any:
    """The RunnerConfig of ``slug``.

    Raises:
        PluginError: there is no such slug (with the nearest ones), or its plugin cannot be used.
    """
    return _get(RUNNERS, slug)


def get_postprocessor(name: str) -> Any:
    """The PostprocessorConfig called ``name``.

    Raises:
        PluginError: there is none of that name (with the nearest ones), or its plugin cannot be used.
    """
    return _get(POSTPROCESSORS, name)


def get_reward(name: str) -> Any:
    """The RewardConfig called ``name``.

    Raises:
        PluginError: there is none of that name (with the nearest ones), or its plugin cannot be used.
    """
    return _get(REWARDS, name)


def _discover(kind: Kind) -> dict[str, PluginEntry]:
    found: dict[str, PluginEntry] = {}
    for entry in (*_from_environment(kind), *_from_distributions(kind)):
        first = found.setdefault(entry.slug, entry)
        if first is not entry and (first.reference, first.source) != (entry.reference, entry.source):
            both = f"{first.reference} ({first.source}) is used, {entry.reference} ({entry.source}) is not"
            found[entry.slug] = replace(first, notice=f"{kind.noun} {entry.slug!r} is there twice: {both}")
    return dict(sorted(found.items()))


def _get(kind: Kind, name: str) -> Any:
    entries = _discover(kind)
    if name not in entries:
        hint = nearest(name, entries) or (f"; there are {', '.join(entries)}" if entries else "; none is installed")
        raise PluginError(f"there is no {kind.noun} {name!r}{hint}")
    return entries[name].load()


def _from_environment(kind: Kind) -> Iterator[PluginEntry]:
    for text in filter(None, map(str.strip, os.environ.get(kind.variable, "").split(","))):
        slug, _, reference = map(str.strip, text.partition("="))
        yield PluginEntry(kind, slug or text, reference if slug else text, kind.variable)


def _from_distributions(kind: Kind) -> Iterator[PluginEntry]:
    """Unlike ``entry_points()``, reads only distributions that mention the group, and a bad one hides no other."""
    for distribution in importlib.metadata.distributions():
        try:
            if kind.group not in (distribution.read_text("entry_points.txt") or ""):
                continue
            source = f"{distribution.metadata['Name']} {distribution.version}"
            points = sorted(p for p in distribution.entry_points if p.group == kind.group)
        except Exception as error:
            warnings.warn(f"entry points of {distribution} cannot be read: {error}", PluginWarning, stacklevel=2)
            continue
        for point in points:
            yield PluginEntry(kind, point.name, point.value, source, distribution)
