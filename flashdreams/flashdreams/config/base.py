"""Configs are data: frozen dataclasses that name, lazily, the class they build. No torch here."""

from __future__ import annotations

import dataclasses
import importlib
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

T = TypeVar("T")


class ConfigError(ValueError):
    """A config value is wrong. The message names the value, what was expected and what to do."""


def import_object(reference: str) -> Any:
    """Import ``"package.module:name"`` and return the object.

    Raises:
        ConfigError: the reference is malformed, or names nothing importable.
    """
    module_name, separator, attribute = reference.partition(":")
    if not separator or not module_name or not attribute:
        raise ConfigError(f"{reference!r} is not of the form 'package.module:name'")
    module = importlib.import_module(module_name)
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise ConfigError(f"module {module_name!r} has no attribute {attribute!r}") from None


@dataclass(frozen=True, kw_only=True)
class InstantiateConfig(Generic[T]):
    """Base of every config. ``setup()`` validates the whole tree, then builds ``_target(self, ...)``.

    Subclasses are frozen dataclasses with ``kw_only=True``; they set
    ``_target: ClassVar[str] = "package.module:Class"`` and override :meth:`validate`.
    """

    _target: ClassVar[str] = ""

    def validate(self) -> None:
        """Raise :class:`ConfigError` if a field of this config alone is out of range."""

    def validate_tree(self) -> None:
        """Run :meth:`validate` here and in every nested config."""
        self.validate()
        for child in nested_configs(self):
            child.validate_tree()

    def setup(self, **kwargs: Any) -> T:
        """Validate, import the target class and build it from this config."""
        self.validate_tree()
        if not self._target:
            raise ConfigError(f"{type(self).__name__} names no _target and cannot be set up")
        return import_object(self._target)(self, **kwargs)


def nested_configs(config: InstantiateConfig) -> list[InstantiateConfig]:
    """The configs that stand directly in the fields of ``config``, also inside tuples."""
    found: list[InstantiateConfig] = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, InstantiateConfig):
                found.append(item)
    return found
