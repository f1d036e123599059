"""Configs as plain data (what JSON and YAML can hold), both ways. No torch here.

A file can only set fields of a config tree that exists already. It names no classes, neither by YAML tags nor
otherwise, and the type of a value is that of its field, never what YAML would make of the word: ``seed: 007`` is
7, ``fps: 24`` is the text "24" where the field is text, ``eps: 1e-6`` is a number.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeVar

from flashdreams.config.base import ConfigError
from flashdreams.config.derive import derive_config
from flashdreams.config.fields import (
    MISMATCH,
    FieldTypeError,
    conform,
    describe,
    element_types,
    field_types,
    holds_configs,
    is_config,
    join,
    members,
    must_be_finite,
    names_code,
    nonfinite,
    shown,
    unknown_field,
)

C = TypeVar("C")

_INTEGER = re.compile(r"[+-]?[0-9]{1,400}")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", re.ASCII)
_SPECIAL = re.compile(r"[+-]?\.?(inf|nan)", re.IGNORECASE)
_NULLS = ("", "~", "null", "Null", "NULL")
_BOOLS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_ORDER = (NoneType, bool, int, float, Literal, tuple, Path, str)


class Word(str):
    """Text whose type its field decides: an unquoted YAML scalar or a word of the command line."""


def to_dict(config: Any) -> dict[str, Any]:
    """The config tree as dicts, lists and scalars that JSON can hold (``None``, bool, int, float, str).

    Raises:
        ConfigError: a value is an infinity or a NaN where the field's default is not, or is no plain data.
    """
    return _plain_config(config, "")


def _plain_config(config: Any, path: str) -> dict[str, Any]:
    plain = {}
    for name in field_types(type(config)):
        value = getattr(config, name)
        _check_finite(type(config), name, value, join(path, name))
        plain[name] = _plain(value, join(path, name))
    return plain


def _plain(value: Any, path: str) -> Any:
    if is_config(value):
        return _plain_config(value, path)
    if isinstance(value, tuple):
        return [_plain(item, join(path, str(index))) for index, item in enumerate(value)]
    if isinstance(value, Path):
        return str(value)
    if nonfinite(value):
        return {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}[str(value)]  # JSON has no word for them
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ConfigError(
        f"{path} is a {type(value).__name__}, which has no form as text; use numbers, text, tuples, configs"
    )


def apply_dict(config: C, tree: Mapping[str, Any]) -> C:
    """A copy of ``config`` with the fields that ``tree`` (as from :func:`to_dict`, or a part of it) sets.

    Raises:
        ConfigError: a key names no field of the tree, or a value does not fit its field.
    """
    return derive_config(config, _patch(config, tree, ""))


def _patch(config: Any, tree: Any, path: str) -> dict[str, Any]:
    if not isinstance(tree, Mapping):
        raise FieldTypeError(f"{path or 'the config'} is {shown(tree)}; expected its fields, as 'name: value'")
    types = field_types(type(config))
    patch: dict[str, Any] = {}
    for key, value in tree.items():
        if str(key).startswith("_"):
            raise ConfigError(
                f"{join(path, str(key))}: a file sets values of a config; it cannot name or change classes"
            )
        if key not in types:
            raise unknown_field(path, str(key), types)
        where = join(path, key)
        patch[key] = _field_value(getattr(config, key), value, types[key], where)
        if key in names_code(type(config)) and patch[key] != getattr(config, key):
            raise ConfigError(
                f"{where} is {shown(value)}, a function to run; a file cannot choose code. "
                "If you trust it, give the same value on the command line"
            )
        _check_finite(type(config), key, patch[key], where)
    return patch


def _field_value(current: Any, value: Any, annotation: Any, path: str) -> Any:
    if is_config(current) and read(value, NoneType) is not None:
        return _patch(current, value, path)
    if holds_configs(current):
        if not isinstance(value, list) or len(value) != len(current):
            raise FieldTypeError(f"{path}: expected a list of {len(current)}, one for each config that stands there")
        pairs = zip(current, value, strict=True)
        return {str(index): _patch(*pair, join(path, str(index))) for index, pair in enumerate(pairs)}
    if isinstance(value, Mapping):
        raise FieldTypeError(
            f"{path} holds {shown(current)}, no config; a file cannot add one. Expected {describe(annotation)}"
        )
    fitted = read(value, annotation)
    if fitted is MISMATCH:
        raise FieldTypeError(f"{path} is {shown(value)}; expected {describe(annotation)}")
    return fitted


def read(value: Any, annotation: Any) -> Any:
    """Plain data (or a :class:`Word`) as the type that ``annotation`` asks for, or ``MISMATCH``."""
    if not isinstance(value, Word):
        fitted = conform(value, annotation)
        if fitted is not MISMATCH:
            return fitted
    kinds = (NoneType, bool, int, float, str) if annotation is Any else members(annotation)
    for member in sorted(kinds, key=_precedence):
        fitted = _read_member(value, member)
        if fitted is not MISMATCH:
            return fitted
    return MISMATCH


def _precedence(member: Any) -> int:
    kind = typing.get_origin(member) or member
    return _ORDER.index(kind) if kind in _ORDER else len(_ORDER)


def _read_member(value: Any, member: Any) -> Any:
    if isinstance(value, list) and typing.get_origin(member) is tuple:
        kinds = element_types(typing.get_args(member), len(value))
        items = tuple(map(read, value, kinds)) if kinds is not None else (MISMATCH,)
        return MISMATCH if any(item is MISMATCH for item in items) else items
    if not isinstance(value, str):
        return MISMATCH
    if member is Path:
        return Path(value)
    if member is float and (_SPECIAL.fullmatch(value) or (isinstance(value, Word) and _NUMBER.fullmatch(value))):
        return float(value.replace(".inf", "inf").replace(".nan", "nan"))
    return _read_word(value, member) if isinstance(value, Word) else MISMATCH


def _read_word(word: Word, member: Any) -> Any:
    if member is NoneType and word in _NULLS:
        return None
    if member is bool:
        return _BOOLS.get(word, MISMATCH)
    if member is int and _INTEGER.fullmatch(word):
        return int(word)
    if member is str:
        return str(word)
    if typing.get_origin(member) is Literal:
        for option in sorted(typing.get_args(member), key=lambda option: _precedence(type(option))):
            if read(word, type(option)) == option:
                return option
    return MISMATCH


def _check_finite(cls: type, name: str, value: Any, path: str) -> None:
    if nonfinite(value) and must_be_finite(cls, name):
        raise ConfigError(f"{path} is {value}; expected a finite number")
