"""On what a compiled call depends: what PyTorch's tracer read of its arguments, as expressions in Python.

The tracer notes it as guards, each with a kind and the expression that it is about, such as ``L['context'].visible``.
An argument's value that the call does not depend on, such as the number of the chunk, is in none of them.
"""

from __future__ import annotations

import builtins
import hashlib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

Condition = tuple[str, str]
"""What is looked at, and the expression of what it is looked at of."""

PLAIN = (bool, int, float, str, torch.dtype, torch.device, type(None))

_VALUES = ("CONSTANT_MATCH", "EQUALS_MATCH", "ID_MATCH", "BOOL_MATCH", "NONE_MATCH", "TUPLE_MATCH")
_LOOKED_AT = {
    "TYPE_MATCH": "type",
    "TENSOR_MATCH": "tensor",
    "SEQUENCE_LENGTH": "length",
    "DICT_KEYS_MATCH": "keys",
    "EMPTY_NN_MODULE_HOOKS_DICT": "empty",
    **dict.fromkeys(_VALUES, "value"),
}
_LOOKED_FOR = {
    "NOT_PRESENT_IN_GENERIC_DICT": ("own", "attr"),
    "HASATTR": ("attribute", "attr"),
    "DICT_CONTAINS": ("key", "key"),
    "DICT_NOT_CONTAINS": ("key", "key"),
}
"""What is looked for, and how the guard calls its name."""
_STATE = {
    "SHAPE_ENV", "DETERMINISTIC_ALGORITHMS", "GRAD_MODE", "DEFAULT_DEVICE", "GLOBAL_STATE", "TORCH_FUNCTION_STATE",
    "AUTOGRAD_SAVED_TENSORS_HOOKS",
}  # fmt: skip
_NAMED = {"MODULE_MATCH", "BUILTIN_MATCH", "TYPE_MATCH", "CLASS_MATCH", "DUPLICATE_INPUT"}
"""Of global names: what they stand for is said by the files that were traced."""
_FUNCTIONS = {"CLOSURE_MATCH", "FUNCTION_MATCH"}

_CODE = {
    "type": "{0}.__class__",
    "value": "({0}.__class__, {0})",
    "tensor": "({0}.__class__, {0}.shape, {0}.stride(), {0}.dtype, {0}.device)",
    "length": "({0}.__class__, len({0}))",
    "keys": "tuple({0})",
    "empty": "not {0}",
    "own": "{1!r} in {0}.__dict__",
    "attribute": "hasattr({0}, {1!r})",
    "key": "{1!r} in {0}",
}


class NotKept(Exception):
    """A call depends on something that cannot be written down here."""


def conditions_of(guards: Iterable[Any]) -> tuple[list[Condition], list[Condition]]:
    """Those of the arguments, and those of global names.

    Raises:
        NotKept: there is a guard of a kind that is not known here.
    """
    own, outer = set(), set()
    for guard in guards:
        kind, name = guard.create_fn_name(), guard.name
        if kind in _STATE:
            continue
        if name.startswith("L[") and kind in _LOOKED_FOR:
            what, keyword = _LOOKED_FOR[kind]
            if not isinstance(sought := guard.create_fn.keywords[keyword], str):
                raise NotKept(f"{kind} {name}, which is no text")
            own.add((f"{what} {sought}", name))
        elif name.startswith("L[") and kind in _LOOKED_AT:
            own.add((_LOOKED_AT[kind], name))
        elif name.startswith("G[") and kind in _VALUES:
            outer.add(("value", name))
        elif name.startswith("G[") and kind in _FUNCTIONS:
            outer.add(("function", name))
        elif name.startswith("G[") and kind == "SEQUENCE_LENGTH":
            outer.add(("length", name))
        elif not (kind in _NAMED | _FUNCTIONS and name.startswith(("G[", "type(L[", "dict(type(L["))):
            raise NotKept(f"{kind} {name}")
    own.discard(("type", "L['self']"))  # which is ours
    return sorted(own), sorted(outer)


def reader(conditions: Sequence[Condition]) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    """What ``conditions`` look at, given the arguments by name: values that compare and hash."""
    parts = "".join(f"{_code(what, name)}, " for what, name in conditions)
    return eval(f"lambda L: ({parts})", {})  # of names that the tracer made


def _code(what: str, name: str) -> str:
    kind, _, sought = what.partition(" ")
    return _CODE[kind].format(name, sought)


def picker(names: Sequence[str]) -> Callable[[dict[str, Any]], list[Any]]:
    """A list of what expressions stand for, given the arguments by name."""
    return eval(f"lambda L: [{', '.join(names)}]", {})


def outer_values(conditions: Sequence[Condition], scope: dict[str, Any]) -> list[Any]:
    """What ``conditions`` of global names look at now, written down."""
    found = []
    for what, name in conditions:
        value = eval(name, {"G": _Globals(scope)})
        found.append(_name_of(value) if what == "function" else to_json(len(value) if what == "length" else value))
    return found


class _Globals(dict[str, Any]):
    """Global names of a function, and those under which the tracer knows those of the functions that it calls."""

    def __missing__(self, name: str) -> Any:
        if name.startswith("__builtins_dict"):
            return vars(builtins)
        if name.startswith("__import_"):
            return importlib.import_module(name.removeprefix("__import_").replace("_dot_", "."))
        raise KeyError(name)


def to_json(value: Any) -> Any:
    """What a condition looks at, written down; :func:`from_json` reads it.

    Raises:
        NotKept: it is nothing that can be.
    """
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, type):
        return {"type": _name_of(value)}
    if isinstance(value, (tuple, frozenset)):
        return {"frozenset" if isinstance(value, frozenset) else "tuple": [to_json(item) for item in value]}
    if type(value) in (bool, int, float, str, type(None)):
        return value
    raise NotKept(f"a {type(value).__name__}")


def from_json(value: Any) -> Any:
    """What :func:`to_json` wrote.

    Raises:
        LookupError, AttributeError, ImportError: a type that is not there.
    """
    if not isinstance(value, dict):
        return value
    ((kind, told),) = value.items()
    match kind:
        case "dtype":
            return getattr(torch, told)
        case "device":
            return torch.device(told)
        case "type":
            return _named(told)
    items = [from_json(item) for item in told]
    return frozenset(items) if kind == "frozenset" else tuple(items)


def _name_of(value: Any) -> str:
    name = f"{value.__module__}:{value.__qualname__}"
    if "<" not in name and _named(name) is value:
        return name
    raise NotKept(f"{value!r}, which no module has under its name")


def _named(name: str) -> Any:
    module, _, inner = name.partition(":")
    value: Any = type(None) if inner == "NoneType" else importlib.import_module(module)
    for part in inner.split(".") if value is not type(None) else ():
        value = getattr(value, part)
    return value


def sources(traced: Iterable[CodeType]) -> dict[str, str]:
    """Digests of the files of traced functions, by module; PyTorch and Python are known by their versions.

    Raises:
        NotKept: a function is in no module's file.
    """
    files = {code.co_filename for code in traced}
    modules = {module.__file__: name for name, module in list(sys.modules.items()) if getattr(module, "__file__", None)}
    ours = {
        file for file in files if modules.get(file, "").partition(".")[0] not in ("torch", *sys.stdlib_module_names)
    }
    if unknown := sorted(ours - set(modules)):
        raise NotKept(f"code in {unknown[0]}, which is no module's file")
    return {modules[file]: digest(modules[file]) for file in ours}


def digest(module: str) -> str:
    """Of the file of ``module`` as it is now; empty where it cannot be read."""
    try:
        return hashlib.sha256(Path(inspect.getfile(importlib.import_module(module))).read_bytes()).hexdigest()
    except (ImportError, OSError, TypeError):
        return ""


def arguments(function: Any) -> Callable[[tuple[Any, ...], Mapping[str, Any]], dict[str, Any]] | None:
    """What gives arguments their names; ``None`` for functions that take any number of them."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) for parameter in parameters.values()):
        return None
    names = tuple(parameters)
    defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
    return lambda args, kwargs: {**defaults, **dict(zip(names, args, strict=False)), **kwargs}


def what_hangs_on(value: Any, known: set[int] | None = None) -> list[Any]:
    """All that arguments hold, tensors by their identity: after a call that leaves it as it was, nothing has changed
    but the values of tensors."""
    known = set() if known is None else known
    if isinstance(value, PLAIN):
        return [(type(value), value)]
    found = [] if isinstance(value, tuple) else [id(value)]
    if id(value) in known or isinstance(value, (Tensor, type, FunctionType, ModuleType)):
        return found
    known.add(id(value))
    if isinstance(value, Mapping):
        inner = [item for pair in value.items() for item in pair]
    elif isinstance(value, (list, tuple, set, frozenset)):
        inner = list(value)
    else:
        slots = [getattr(value, name, None) for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
        inner = [*getattr(value, "__dict__", {}).values(), *slots]
    return found + [len(inner)] + [place for item in inner for place in what_hangs_on(item, known)]
