"""What the fields of a config class hold: their types, how a value fits them, how to speak of them. No torch here."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Union

from flashdreams.config.base import ConfigError

MISMATCH: Any = type("Mismatch", (), {"__repr__": lambda self: "MISMATCH"})()
"""What :func:`conform` returns for a value that does not fit (any ordinary value might)."""

_NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
    type(None): "None",
}


class UnknownFieldError(ConfigError, KeyError):
    """A path names no field of the config; the message has the full path and the nearest name."""

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return self.args[0]


class FieldTypeError(ConfigError, TypeError):
    """A value has not the type of its field; the message has the full path."""


def is_config(value: object) -> bool:
    """Whether ``value`` is an instance of a config class (any dataclass)."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def holds_configs(value: object) -> bool:
    """Whether ``value`` is a tuple of configs."""
    return isinstance(value, tuple) and any(is_config(item) for item in value)


@functools.cache
def field_types(cls: Any) -> dict[str, Any]:
    """Resolved annotations of the fields of ``cls``, in their order.

    Raises:
        ConfigError: an annotation names something that its module does not import at run time.
    """
    try:
        hints = typing.get_type_hints(cls)
    except NameError as error:
        raise ConfigError(
            f"a field of {cls.__qualname__} cannot be read: {error}; import it in {cls.__module__}"
        ) from None
    return {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.init}


def members(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a union; the annotation itself if it is none."""
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def conform(value: Any, annotation: Any) -> Any:
    """``value`` as ``annotation`` wants it, or :data:`MISMATCH`.

    Types are exact (a bool is no int, a list no tuple), except that a whole number serves as a float.
    """
    for widen in (False, True):
        for member in members(annotation):
            fitted = _fit(value, member, widen)
            if fitted is not MISMATCH:
                return fitted
    return MISMATCH


def _fit(value: Any, member: Any, widen: bool) -> Any:
    origin = typing.get_origin(member)
    if origin is Literal:
        same = any(type(option) is type(value) and option == value for option in typing.get_args(member))
        return value if same else MISMATCH
    if origin is tuple:
        return _fit_tuple(value, typing.get_args(member))
    if member is int or member is float:
        if isinstance(value, member) and not isinstance(value, bool):
            return value
        if widen and member is float and isinstance(value, int) and not isinstance(value, bool):
            try:
                return float(value)
            except OverflowError:
                return MISMATCH
        return MISMATCH
    kind = origin or member
    if kind is Any or not isinstance(kind, type):  # or a type variable: nothing to hold the value to
        return value
    return value if isinstance(value, kind) else MISMATCH


def _fit_tuple(value: Any, items: tuple[Any, ...]) -> Any:
    if not isinstance(value, tuple):
        return MISMATCH
    kinds = element_types(items, len(value))
    fitted = tuple(map(conform, value, kinds)) if kinds is not None else (MISMATCH,)
    return MISMATCH if any(item is MISMATCH for item in fitted) else fitted


def element_types(items: tuple[Any, ...], length: int) -> tuple[Any, ...] | None:
    """Annotations of the elements of a ``tuple[items]`` of that length; ``None`` if it cannot be so long."""
    if len(items) == 2 and items[1] is Ellipsis:
        return (items[0],) * length
    return items if len(items) == length else None


def tuple_types(annotation: Any, length: int) -> tuple[Any, ...]:
    """Annotations of the elements of a tuple of ``length`` elements that stands in a field of type ``annotation``."""
    for member in members(annotation):
        kinds = element_types(typing.get_args(member), length) if typing.get_origin(member) is tuple else None
        if kinds is not None:
            return kinds
    return (Any,) * length


def describe(annotation: Any) -> str:
    """``annotation`` in words, for messages."""
    words = []
    for member in members(annotation):
        origin, args = typing.get_origin(member), typing.get_args(member)
        if origin is Literal:
            words.append("one of " + ", ".join(map(repr, args)))
        elif origin is tuple and args[-1:] == (Ellipsis,):
            words.append(f"a list whose items are {describe(args[0])}")
        elif origin is tuple:
            words.append(f"a list of {len(args)} ({'; '.join(map(describe, args))})")
        else:
            words.append(_NAMES.get(member, getattr(member, "__name__", str(member))))
    return " or ".join(words)


def shown(value: Any) -> str:
    """``value`` for a message: short, on one line."""
    if is_config(value):
        return f"a {type(value).__name__}"
    if isinstance(value, (Mapping, list)):
        return "a list" if isinstance(value, list) else "a mapping"
    text = repr(str(value) if isinstance(value, str) else value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def nonfinite(value: Any) -> bool:
    """Whether ``value`` is, or a tuple that holds, an infinity or a NaN."""
    if isinstance(value, tuple):
        return any(map(nonfinite, value))
    return isinstance(value, float) and not math.isfinite(value)


@functools.cache
def names_code(cls: type) -> frozenset[str]:
    """Fields, marked by ``metadata={"names_code": True}``, whose value is a function that will be imported and run."""
    return frozenset(
        field.name for field in dataclasses.fields(typing.cast(Any, cls)) if field.metadata.get("names_code")
    )


def must_be_finite(cls: Any, name: str) -> bool:
    """Whether field ``name`` takes no infinity and no NaN: all but those whose own default is one."""
    return not any(nonfinite(field.default) for field in dataclasses.fields(cls) if field.name == name)


def nearest(name: str, options: Iterable[str]) -> str:
    """``"; did you mean 'x' or 'y'?"`` for the options most like ``name``, or ``""``."""
    import difflib  # only a mistake needs it

    close = difflib.get_close_matches(name, list(options), n=3, cutoff=0.55)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


def unknown_field(path: str, name: str, options: Iterable[str]) -> UnknownFieldError:
    """The error for ``name``, which is no field of the config at ``path`` (``""`` for the root)."""
    options = list(options)
    hint = nearest(name, options) or f"; its fields are {', '.join(options)}"
    return UnknownFieldError(f"{join(path, name)}: {path or 'the config'} has no field {name!r}{hint}")


def join(path: str, name: str) -> str:
    """Dotted path of field ``name`` of the config at ``path``."""
    return f"{path}.{name}" if path else name
