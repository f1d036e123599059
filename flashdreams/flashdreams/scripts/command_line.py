"""From words to a config: the command line of a runner, parsed by tyro and judged by the fields. No torch here."""

from __future__ import annotations

import contextlib
import typing
from collections.abc import Iterable, Sequence
from types import NoneType
from typing import Annotated, Any, Union

from flashdreams.config import derive_config
from flashdreams.config.fields import MISMATCH, describe, members, nearest, nonfinite, shown
from flashdreams.config.plain import Word, read
from flashdreams.infra.config import RunnerConfig
from flashdreams.infra.errors import UserError
from flashdreams.scripts.flags import Flag, FlagGroup, flags_of

MAX_SEED = 2**64 - 1


def apply_flags(config: RunnerConfig, words: Sequence[str], *, known: Sequence[str] = ()) -> RunnerConfig:
    """``config`` with the flags among ``words`` applied.

    Args:
        known: other flags that exist, for suggestions.

    Raises:
        UserError: an unknown flag (with the nearest ones), or a value that does not fit.
    """
    group = flags_of(config)
    flags = {flag.path: flag for flag in group.all_flags()}
    given, unknown = _split(group, _gathered(words, flags.values()))
    values = {path: _value(flags[path], value) for path, value in given.items()}
    if unknown:
        raise UserError(_about_unknown(unknown[0], [flag.name for flag in flags.values()] + list(known)))
    return derive_config(config, values)


def _gathered(words: Sequence[str], flags: Iterable[Flag]) -> list[str]:
    """The words, with those of a list's flag that stands several times (``--lora a --lora b``) after its first one."""
    lists = {flag.name for flag in flags if flag.metavar.endswith("...")}
    turns: list[list[str]] = [[]]
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            turns.append([name.replace("_", "-"), value] if equals and name.replace("_", "-") in lists else [word])
        else:
            turns[-1].append(word)
    first: dict[str, list[str]] = {}
    for turn in turns[1:]:
        kept = first.setdefault(turn[0].replace("_", "-"), turn)
        if kept is not turn and turn[0].replace("_", "-") in lists:
            kept += turn[1:]
            turn.clear()
    return [word for turn in turns for word in turn]


class _Given(list[str]):
    """Words that stand on the command line, as opposed to a default."""


def _split(group: FlagGroup, words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Which flags are given, by path, and what is left over; tyro knows the grammar of command lines."""
    import tyro

    given: Any = tyro.cli(
        FlagGroup, default=group, args=words, registry=_registry(), add_help=False, return_unknown_args=True
    )
    return given


def print_help(config: RunnerConfig, program: str, description: str) -> None:
    """Every flag of the config tree with its documentation, on stdout."""
    import tyro

    with contextlib.suppress(SystemExit):  # how tyro ends after a help page
        tyro.cli(
            FlagGroup, default=flags_of(config), args=["--help"], registry=_registry(), prog=program,
            description=description,
        )  # fmt: skip


def _registry() -> Any:
    """Tells tyro to make its parser from a :class:`FlagGroup`."""
    from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructFieldSpec, StructTypeInfo

    registry = ConstructorRegistry()

    @registry.struct_rule
    def flag_group(info: StructTypeInfo) -> StructConstructorSpec | None:
        group = info.default
        if not isinstance(group, FlagGroup):
            return None
        fields = [StructFieldSpec(name, *_tyro_flag(flag), flag.doc or None) for name, flag in group.flags.items()]
        fields += [StructFieldSpec(name, FlagGroup, inner, inner.doc or None) for name, inner in group.groups.items()]

        def collect(**values: Any) -> dict[str, Any]:
            given = {}
            for name, value in values.items():
                if name in group.groups:
                    given |= value
                elif isinstance(value, _Given) or (isinstance(value, bool) and value != group.flags[name].value):
                    given[group.flags[name].path] = value
            return given

        return StructConstructorSpec(instantiate=collect, fields=tuple(fields))

    return registry


def _tyro_flag(flag: Flag) -> tuple[Any, Any]:
    """Type and default of a flag for tyro: any number of words, which :func:`_value` judges; bools are switches."""
    from tyro.constructors import PrimitiveConstructorSpec

    if flag.annotation is bool:
        return bool, flag.value
    spec = PrimitiveConstructorSpec(
        nargs="*",
        metavar=flag.metavar,
        instance_from_str=_Given,
        is_instance=lambda value: True,
        str_from_instance=lambda value: list(map(str, value)) if isinstance(value, tuple) else [str(value)],
    )
    return Annotated[object, spec], flag.value


def _value(flag: Flag, given: Any) -> Any:
    """The value that the words after a flag stand for."""
    if isinstance(given, bool):
        return given
    if flag.path == "seed":
        return parse_seed(given[0] if len(given) == 1 else " ".join(given))
    kinds = [kind for kind in members(flag.annotation) if kind is not NoneType]
    if given == ["None"] and len(kinds) < len(members(flag.annotation)):
        return None
    many = any(typing.get_origin(kind) is tuple for kind in kinds)
    if not many and len(given) != 1:
        if not given:
            raise UserError(f"{flag.name} needs a value ({flag.name}=-x for one that starts with a dash)")
        raise UserError(f"{flag.name} takes one value, not {len(given)}; put quotes around text with spaces")
    make = str if str in kinds else Word
    words = [make(word) for word in given]
    value = read(words if many else words[0], Union[tuple(kinds)])  # noqa: UP007 - made at run time
    if value is MISMATCH:
        raise UserError(f"{flag.name} is {shown(' '.join(given))}; expected {describe(flag.annotation)}")
    if flag.finite and nonfinite(value):
        raise UserError(f"{flag.name} is {shown(' '.join(given))}; expected a finite number")
    return value


def parse_seed(text: str) -> int:
    """A seed as people type it: decimal digits (leading zeros are fine) for a number from 0 to 2**64 - 1, no more.

    Raises:
        UserError: anything else, such as a sign, a space, an exponent, a hexadecimal or a larger number.
    """
    digits = text.lstrip("0") if text.isascii() and text.isdigit() else None
    if digits is None or len(digits) > len(str(MAX_SEED)) or int(digits or "0") > MAX_SEED:
        raise UserError(f"--seed is {shown(text)}; expected a whole number from 0 to {MAX_SEED}, in decimal digits")
    return int(digits or "0")


def _about_unknown(word: str, names: list[str]) -> str:
    flag = word.partition("=")[0].replace("_", "-")
    if not flag.startswith("-"):
        return f"{shown(word)} belongs to no flag; flags start with --, and text with spaces needs quotes"
    inner = [name for name in names if name.endswith("." + flag.lstrip("-"))]
    hint = f"; did you mean {' or '.join(map(repr, inner[:3]))}?" if inner else nearest(flag, names)
    return f"there is no flag {flag}{hint or '; --help lists them'}"
