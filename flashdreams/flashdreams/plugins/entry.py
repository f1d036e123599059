"""One thing that a plugin brings, found but not yet imported. No torch here."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import re
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flashdreams.config import ConfigError, InstantiateConfig
from flashdreams.plugins import API_VERSION
from flashdreams.plugins.compatibility import declared_api, required_version


class PluginError(ConfigError):
    """A name is unknown, or its plugin cannot be used; the message names it, its module and the cause."""


class PluginWarning(UserWarning):
    """Something about a plugin that does not stop it."""


@dataclass(frozen=True)
class Kind:
    """What plugins bring: where it is declared, and how its config is told from others.

    The classes themselves stand in layers above this one.
    """

    noun: str
    group: str
    """Entry points of this group: the name is the thing's own, the value ``module:attr`` is its config, or a mapping
    of names to configs."""
    variable: str
    """The same for plugins in development, as ``name=module:attr,name2=module:attr``; goes before entry points."""
    config: str
    """Name of the config class."""
    name: str
    """Field of the config that repeats the name."""
    mark: str
    """Another attribute that configs of this kind have."""


@dataclass(frozen=True)
class PluginEntry:
    """One name of a kind, not yet imported."""

    kind: Kind
    slug: str
    reference: str
    """``module:attr``, as its source states it."""
    source: str
    """The distribution and its version, or the environment variable."""
    distribution: importlib.metadata.Distribution | None = field(default=None, repr=False, compare=False)
    notice: str = ""
    """What to say when this entry is loaded: that it stands in the place of another."""

    def load(self) -> Any:
        """Import the plugin's config module (no other plugin's) and return its config.

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
        kind = self.kind
        if not (isinstance(value, InstantiateConfig) and hasattr(value, kind.name) and hasattr(value, kind.mark)):
            raise PluginError(f"it is a {type(value).__name__}; expected a {kind.config} or a mapping of slugs to them")
        if (name := getattr(value, kind.name)) != self.slug:
            raise PluginError(f"its {kind.name} is {name!r}; expected the slug, {self.slug!r}")
        return value

    def _cause(self, module_name: str, error: BaseException) -> str:
        made_for = declared_api(module_name)
        if made_for is not None and made_for != API_VERSION:
            return f"made for API {made_for}, this flashdreams speaks {API_VERSION} ({type(error).__name__}: {error})"
        return f"{required_version(self.distribution)}{type(error).__name__}: {error}"
