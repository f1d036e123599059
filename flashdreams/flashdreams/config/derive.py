"""Variants of a config: ``derive_config(BASE, ...)``. No torch here."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from flashdreams.config.fields import (
    MISMATCH,
    FieldTypeError,
    conform,
    describe,
    field_types,
    holds_configs,
    is_config,
    join,
    shown,
    tuple_types,
    unknown_field,
)

C = TypeVar("C")


def derive_config(base: C, patch: Mapping[str, Any] | None = None, /, **nested: Any) -> C:
    """A deep copy of the config ``base`` with fields replaced.

    A config-valued field takes a whole config, or a mapping that patches the one that stands there; a
    tuple of configs takes a whole tuple, or a mapping from indices to patches. ``patch`` is applied
    before ``nested``, and its keys may be dotted::

        derive_config(PIPELINE, name="mine", diffusion_model={"transformer": {"len_t": 4}})
        derive_config(PIPELINE, {"diffusion_model.transformer.len_t": 4})

    Raises:
        KeyError: a path names no field (:class:`~flashdreams.config.UnknownFieldError`, with the nearest name).
        TypeError: a value has not its field's type (:class:`~flashdreams.config.FieldTypeError`).
    """
    return _patched(copy.deepcopy(base), [*(patch or {}).items(), *nested.items()], "")


def _patched(config: Any, items: list[tuple[str, Any]], path: str) -> Any:
    types = field_types(type(config))
    changes: dict[str, Any] = {}
    for key, value in items:
        name, _, rest = str(key).partition(".")
        if name not in types:
            raise unknown_field(path, name, types)
        current = changes.get(name, getattr(config, name))
        changes[name] = _value(current, {rest: value} if rest else value, types[name], join(path, name))
    return dataclasses.replace(config, **changes)


def _value(current: Any, value: Any, annotation: Any, path: str) -> Any:
    if isinstance(value, Mapping):
        if is_config(current):
            return _patched(current, list(value.items()), path)
        if holds_configs(current):
            return _patched_tuple(current, value, annotation, path)
        if current is None:
            raise FieldTypeError(f"{path} is None, so there is nothing to patch; give a whole config")
    fitted = conform(value, annotation)
    if fitted is MISMATCH:
        raise FieldTypeError(f"{path} is {shown(value)} ({type(value).__name__}); expected {describe(annotation)}")
    return copy.deepcopy(fitted)


def _patched_tuple(current: tuple[Any, ...], patch: Mapping[Any, Any], annotation: Any, path: str) -> tuple[Any, ...]:
    items = list(current)
    indices = [str(index) for index in range(len(items))]
    kinds = tuple_types(annotation, len(items))
    for key, value in patch.items():
        index, _, rest = str(key).partition(".")
        if index not in indices:
            raise unknown_field(path, index, indices)
        position = int(index)
        items[position] = _value(items[position], {rest: value} if rest else value, kinds[position], join(path, index))
    return tuple(items)
