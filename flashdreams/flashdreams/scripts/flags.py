"""The flags of a runner, as its config tree has them: one for each field that words can set. No torch here."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any, Literal

from flashdreams.config.docs import class_doc, field_docs
from flashdreams.config.fields import field_types, holds_configs, is_config, join, members, must_be_finite

_HIDDEN = ("runner_name", "description", "default_num_frames", "pipeline.name")
"""What names the slug rather than a run of it."""
_METAVARS = {str: "TEXT", Path: "FILE", int: "N", float: "X", bool: "{true,false}"}


@dataclass(frozen=True)
class Flag:
    """One flag: a field that is no config itself."""

    path: str
    annotation: Any
    value: Any
    doc: str
    finite: bool

    @property
    def name(self) -> str:
        return "--" + self.path.replace("_", "-")

    @property
    def metavar(self) -> str:
        return _metavar(self.annotation)


@dataclass(frozen=True)
class FlagGroup:
    """The flags of one config, and the groups of the configs in it."""

    path: str
    doc: str
    flags: dict[str, Flag] = field(default_factory=dict)
    groups: dict[str, FlagGroup] = field(default_factory=dict)

    def all_flags(self) -> Iterator[Flag]:
        """Its flags, then those of its groups."""
        yield from self.flags.values()
        for group in self.groups.values():
            yield from group.all_flags()

    def all_groups(self) -> Iterator[FlagGroup]:
        """Its groups, each before those in it."""
        for group in self.groups.values():
            yield group
            yield from group.all_groups()


def flags_of(config: Any, path: str = "", doc: str = "") -> FlagGroup:
    """The flags of a config tree. A field that holds no config now, and could hold only one, has none."""
    docs = field_docs(type(config))
    group = FlagGroup(path, doc or class_doc(type(config)))
    for name, annotation in field_types(type(config)).items():
        value, where = getattr(config, name), join(path, name)
        if where in _HIDDEN:
            continue
        if is_config(value):
            group.groups[name] = flags_of(value, where, docs.get(name, ""))
        elif holds_configs(value):
            for index, item in enumerate(value):
                group.groups[f"{name}.{index}"] = flags_of(item, join(where, str(index)))
        elif _metavar(annotation):
            group.flags[name] = Flag(where, annotation, value, docs.get(name, ""), must_be_finite(type(config), name))
    return group


def _metavar(annotation: Any) -> str:
    """Placeholder of a value of that type; ``""`` if words cannot give it."""
    kinds = [kind for kind in members(annotation) if kind is not NoneType]
    if len(kinds) != 1:
        return "|".join(filter(None, map(_metavar, kinds)))
    origin, args = typing.get_origin(kinds[0]), typing.get_args(kinds[0])
    if origin is Literal:
        return "{" + ",".join(map(str, args)) + "}"
    if origin is tuple:
        items = [_METAVARS.get(arg, "") for arg in args if arg is not Ellipsis]
        return " ".join(items) + " ..." * (Ellipsis in args) if all(items) else ""
    return _METAVARS.get(kinds[0], "")
