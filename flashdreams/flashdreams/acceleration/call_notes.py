"""Notes of compiled calls: what a later process has to know to make them without the compiler."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from flashdreams.acceleration.conditions import (
    Condition,
    NotKept,
    conditions_of,
    outer_values,
    picker,
    reader,
    to_json,
    what_hangs_on,
)
from flashdreams.acceleration.generated import Generated

Told = dict[str, Any]
"""A kept call as JSON."""


@dataclass(eq=False)
class Note:
    """Something that was compiled, and on what calls of it depend."""

    generated: Generated
    conditions: list[Condition]
    outer: list[Condition]
    files: dict[str, str]
    read: Callable[[dict[str, Any]], tuple[Any, ...]]
    values: tuple[Any, ...]

    @classmethod
    def of(cls, found: Generated, guards: list[Any], files: dict[str, str], named: dict[str, Any]) -> Note:
        """``named`` are the arguments for which it was compiled.

        Raises:
            NotKept: what it depends on cannot be written down.
        """
        conditions, outer = conditions_of(guards)
        read = reader(conditions)
        values = read(named)
        to_json(values)
        return cls(found, conditions, outer, files, read, values)


@dataclass(eq=False)
class Sight:
    """The first call of something that was compiled."""

    note: Note
    places: dict[int, str]
    """Expressions of the tensors among the arguments, by identity."""
    named: dict[str, Any]
    dicts: dict[str, dict[Any, Any]]
    """Dictionaries among the arguments, as they were."""
    before: list[Any]
    """What hung on the others."""
    seen: tuple[tuple[Any, ...], Any] | None = None
    """The tensors that it was called with, and what it returned."""

    @classmethod
    def of(cls, note: Note, named: dict[str, Any]) -> Sight:
        """Before the call."""
        names = [name for what, name in note.conditions if what == "tensor"]
        places = {id(x): name for name, x in zip(names, picker(names)(named), strict=True)}
        dicts = {name: dict(value) for name, value in named.items() if type(value) is dict}
        return cls(note, places, named, dicts, _others(named, dicts))

    def told(self, function: Any, result: Any) -> Told:
        """The call, which returned ``result``.

        Raises:
            NotKept: it cannot be written down.
        """
        assert self.seen is not None
        (tensors, outputs), note = self.seen, self.note
        if _others(self.named, self.dicts) != self.before:
            raise NotKept("it changes more than tensors")
        if (len(tensors), len(outputs)) != (note.generated.inputs, note.generated.outputs):
            raise NotKept("PyTorch does more than what the compiler generated")
        if torch.is_grad_enabled() or not plain_state() or not all(map(_is_plain, (*tensors, *outputs))):
            raise NotKept("it is no inference with plain tensors on a CPU")
        memory = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        if any(output.untyped_storage().data_ptr() in memory for output in outputs):
            raise NotKept("it returns a view of what it is given")
        if any(id(tensor) not in self.places for tensor in tensors) or len(set(map(id, tensors))) != len(tensors):
            raise NotKept("a tensor is none of its arguments")
        place = {id(output): place for place, output in enumerate(outputs)}
        written = {name: _written(was, self.named[name]) for name, was in self.dicts.items()}
        told = {
            "kind": name_of(function),
            "conditions": note.conditions,
            "values": to_json(note.values),
            "outer": note.outer,
            "outer_values": outer_values(note.outer, function.__globals__),
            "files": note.files,
            "state": global_state().__getstate__(),
            "inputs": [self.places[id(tensor)] for tensor in tensors],
            "outputs": [(tuple(x.shape), x.stride(), to_json(x.dtype)) for x in outputs],
            "written": {name: {key: _form(x, place) for key, x in new.items()} for name, new in written.items()},
            "result": _form(result, place),
            "generated": asdict(note.generated),
        }
        return json.loads(json.dumps(told))


def _others(named: dict[str, Any], dicts: dict[str, Any]) -> list[Any]:
    """What hangs on the arguments that are no dictionaries."""
    return what_hangs_on(tuple(value for name, value in named.items() if name not in dicts))


def _written(was: dict[Any, Any], now: dict[Any, Any]) -> dict[str, Tensor]:
    """What was set in a dictionary. Keys keep their order."""
    new = {key: value for key, value in now.items() if key not in was or value is not was[key]}
    if not all(isinstance(key, str) for key in new) or any(key not in now for key in was):
        raise NotKept("it takes from a dictionary")
    return new


def name_of(function: Any) -> str:
    """Under which calls of modules with this ``forward`` are kept."""
    return f"{function.__module__}:{function.__qualname__}"


def global_state() -> Any:
    """PyTorch's state now: gradients, threads, autocast, determinism."""
    return torch._C._dynamo.guards.GlobalStateGuard()


def plain_state() -> bool:
    """Whether no mode of PyTorch's is active that sees every call."""
    return torch._C._len_torch_function_stack() == 0 and torch._C._len_torch_dispatch_stack() == 0


def _is_plain(tensor: Any) -> bool:
    return type(tensor) in (Tensor, torch.nn.Parameter) and tensor.device.type == "cpu"


def _form(result: Any, places: dict[int, int]) -> Any:
    """``result``, written down with the places of tensors among the outputs."""
    if isinstance(result, Tensor) and id(result) in places:
        return places[id(result)]
    if type(result) in (tuple, list):
        return [type(result).__name__, [_form(item, places) for item in result]]
    if result is None:
        return None
    raise NotKept(f"it returns a {type(result).__name__}")
