"""The registry of runners: entry points and an environment variable. Finding them imports none. No torch here."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from flashdreams.config import ConfigError, InstantiateConfig
from flashdreams.config.fields import nearest
from flashdreams.plugins import API_VERSION
from flashdreams.plugins.compatibility import declared_api, required_version

ENTRY_POINT_GROUP = "flashdreams.runner_configs"
"""An entry point's name is a slug; its value is ``module:attr``, a RunnerConfig or a mapping slug -> RunnerConfig."""
ENV_VAR = "FLASHDREAMS_RUNNER_CONFIGS"
"""``slug=module:attr,slug2=module:attr``, for plugins in development; goes before entry points."""


class PluginError(ConfigError):
    """A slug is unknown, or its plugin cannot be used; the message names slug, module and cause."""


class PluginWarning(UserWarning):
    """Something about a plugin that does not stop it."""


@dataclass(frozen=True)
class RunnerEntry:
    """One slug, not yet imported."""

    slug: str
    reference: str
    """``module:attr``, as its source states it."""
    source: str
    """The distribution and its version, or the environment variable."""
    distribution: importlib.metadata.Distribution | None = field(default=None, repr=False, compare=False)
    notice: str = ""
    """What to say when this entry is loaded: that it stands in the place of another."""

    def load(self) -> Any:
        """Import the plugin's config module (no other plugin's) and return its RunnerConfig.

        Raises:
            PluginError: whatever goes wrong in there.
        """
        if self.notice:
            warnings.warn(self.notice, PluginWarning, stacklevel=2)
        module_name, _, attribute = self.reference.partition(":")
        had_torch = "torch" in sys.modules
        try:
            if not re.fullmatch(r"[\w.]+:[\w.]+", self.reference):
                raise PluginError(f"{self.source} must name it as slug=module:attr")
            with contextlib.redirect_stdout(sys.stderr):  # stdout is for what was asked for
                value = importlib.import_module(module_name)
            if (declared := getattr(value, "FLASHDREAMS_API", API_VERSION)) != API_VERSION:
                raise PluginError(f"made for API {declared}, this flashdreams speaks {API_VERSION}")
            for name in attribute.split("."):
                value = getattr(value, name)
            config = self._pick(value)
        except (Exception, SystemExit) as error:
            cause = str(error) if isinstance(error, PluginError) else self._cause(module_name, error)
            text = " ".join(f"plugin {self.slug!r} ({self.reference}) cannot be used: {cause}".split())
            raise PluginError(text if len(text) <= 500 else f"{text[:497]}...") from error
        if "torch" in sys.modules and not had_torch:
            warnings.warn(
                f"plugin {self.slug!r} imports torch in {module_name}, so listings go without its description; "
                "its author should name classes there by _target only",
                PluginWarning,
                stacklevel=2,
            )
        return config

    def description(self) -> str:
        """Its one line of description; imports the plugin's config module."""
        return self.load().description

    def _pick(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            if self.slug not in value:
                raise PluginError(f"the mapping has no {self.slug!r}, only {', '.join(map(repr, value)) or 'nothing'}")
            value = value[self.slug]
        # infra, where RunnerConfig stands, is above this module.
        if not (isinstance(value, InstantiateConfig) and hasattr(value, "runner_name") and hasattr(value, "pipeline")):
            raise PluginError(f"it is a {type(value).__name__}; expected a RunnerConfig or a mapping of slugs to them")
        if value.runner_name != self.slug:
            raise PluginError(f"its runner_name is {value.runner_name!r}; expected the slug, {self.slug!r}")
        return value

    def _cause(self, module_name: str, error: BaseException) -> str:
        made_for = declared_api(module_name)
        if made_for is not None and made_for != API_VERSION:
            return f"made for API {made_for}, this flashdreams speaks {API_VERSION} ({type(error).__name__}: {error})"
        return f"{required_version(self.distribution)}{type(error).__name__}: {error}"


def discover_runners() -> dict[str, RunnerEntry]:
    """Every slug that is installed, in alphabetical order, none of them imported."""
    found: dict[str, RunnerEntry] = {}
    for entry in (*_from_environment(), *_from_distributions()):
        first = found.setdefault(entry.slug, entry)
        if first is not entry and (first.reference, first.source) != (entry.reference, entry.source):
            both = f"{first.reference} ({first.source}) is used, {entry.reference} ({entry.source}) is not"
            found[entry.slug] = replace(first, notice=f"runner {entry.slug!r} is there twice: {both}")
    return dict(sorted(found.items()))


def get_runner(slug: str) -> Any:
    """The RunnerConfig of ``slug``.

    Raises:
        PluginError: there is no such slug (with the nearest ones), or its plugin cannot be used.
    """
    runners = discover_runners()
    if slug not in runners:
        hint = nearest(slug, runners) or (f"; there are {', '.join(runners)}" if runners else "; none is installed")
        raise PluginError(f"there is no runner {slug!r}{hint}")
    return runners[slug].load()


def _from_environment() -> Iterator[RunnerEntry]:
    for text in filter(None, map(str.strip, os.environ.get(ENV_VAR, "").split(","))):
        slug, _, reference = map(str.strip, text.partition("="))
        yield RunnerEntry(slug or text, reference if slug else text, ENV_VAR)


def _from_distributions() -> Iterator[RunnerEntry]:
    """Unlike ``entry_points()``, reads only distributions that mention the group, and a bad one hides no other."""
    for distribution in importlib.metadata.distributions():
        try:
            if ENTRY_POINT_GROUP not in (distribution.read_text("entry_points.txt") or ""):
                continue
            source = f"{distribution.metadata['Name']} {distribution.version}"
            points = sorted(p for p in distribution.entry_points if p.group == ENTRY_POINT_GROUP)
        except Exception as error:
            warnings.warn(f"entry points of {distribution} cannot be read: {error}", PluginWarning, stacklevel=2)
            continue
        for point in points:
            yield RunnerEntry(point.name, point.value, source, distribution)
