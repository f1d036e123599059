"""Compiled calls that a later process makes without the compiler.

PyTorch keeps what its compiler made, but to find it again a process imports the compiler and traces: on a CPU that
takes longer than all the rest of a start. A kept call is what the compiler generated, the conditions under which
PyTorch's tracer would have taken it (:mod:`~flashdreams.acceleration.conditions`), and where among the arguments its
tensors are. Where no kept call fits, or something in a call could not be written down, the compiler is asked as ever.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch._guards import TracingContext

from flashdreams.acceleration import native
from flashdreams.acceleration.call_notes import Note, Sight, Told, global_state, name_of, plain_state
from flashdreams.acceleration.conditions import (
    NotKept,
    arguments,
    digest,
    from_json,
    outer_values,
    picker,
    reader,
    sources,
)
from flashdreams.acceleration.generated import Generated, generated

MADE_BY = tuple(
    f"flashdreams.acceleration.{name}" for name in ("bias", "call_notes", "compile", "conditions", "generated")
)
"""On whose code kept calls depend too."""


@dataclass
class Ready:
    """A kept call in this process."""

    told: Told
    pick: Callable[[dict[str, Any]], list[Any]]
    call: Callable[[list[Any]], Any] | None = None

    def run(self, tensors: list[Any], named: dict[str, Any], dry: bool) -> Any:
        """What the call returns; ``dry``: memory as it comes, and no input is written."""
        if dry:
            made: Any = [
                torch.empty_strided(shape, stride, dtype=from_json(dtype))
                for shape, stride, dtype in self.told["outputs"]
            ]
        else:
            assert self.call is not None
            made = self.call(list(tensors))
        for name, written in self.told["written"].items():
            named[name].update({key: made[place] for key, place in written.items()})
        return _rebuilt(self.told["result"], made)


@dataclass
class Form:
    """Calls that depend on the same things, by what these are."""

    read: Callable[[dict[str, Any]], tuple[Any, ...]]
    state: str
    """PyTorch's: gradients, threads, autocast and so on."""
    calls: dict[tuple[Any, ...], Ready] = field(default_factory=dict)
    _guard: Any = None
    """What compares that quickly, once it was met."""

    def holds(self) -> bool:
        """Whether PyTorch's state is that of these calls."""
        if self._guard is None:
            now = global_state()
            self._guard = now if now.__getstate__() == self.state else None
        return self._guard is not None and self._guard.check()


class KeptCalls:
    """Those of one kind of module: found again, and noted for later.

    Args:
        function: the ``forward`` of that kind.
        told: what earlier processes noted.
        libraries: of kernels, by name.
        folder: one that can be written.
    """

    def __init__(
        self, function: Any, told: list[Told] | None = None, libraries: Mapping[str, bytes] | None = None,
        folder: Path | None = None,
    ) -> None:  # fmt: skip
        self.noted: list[Told] = []
        """Calls of this process that a later one can make."""
        self.taken: set[int] = set()
        """Those of earlier processes that were made, by identity."""
        self.refused: list[str] = []
        """Why calls of this process cannot be kept."""
        self._function = function
        self._libraries, self._folder = libraries or {}, folder
        self._by_name = arguments(function)
        self._forms: dict[str, Form] = {}
        self._unseen: list[Note] = []
        self._here = threading.local()
        for call in told or ():
            self._add(call)

    def find(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[[bool], Any] | None:
        """The kept call with these arguments, if there is one; it takes whether it is dry."""
        if self._by_name is None or not self._forms or not plain_state():
            return None
        named = self._by_name(args, kwargs)
        for form in self._forms.values():
            try:
                ready = form.calls.get(form.read(named))
            except Exception:  # another structure: what is looked at is not there
                continue
            if ready is None or not form.holds():
                continue
            tensors = ready.pick(named)
            if len(set(map(id, tensors))) == len(tensors) and self._is_loaded(ready, form):
                self.taken.add(id(ready))
                return lambda dry: ready.run(tensors, named, dry)
        return None

    def watch(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], call: Callable[[], Any]) -> Any:
        """``call()``, a call of what is compiled; the first one of each thing that was compiled is noted."""
        if self._by_name is None:
            return call()
        here = self._here
        here.named, here.sight = self._by_name(args, kwargs), None
        if self._unseen and (note := self._met(here.named)) is not None:
            here.sight = Sight.of(note, here.named)
        try:
            result = call()
            sight = here.sight
        finally:
            here.named = here.sight = None
        if sight is not None and sight.seen is not None and sight.note in self._unseen:
            self._unseen.remove(sight.note)
            try:
                self.noted.append(sight.told(self._function, result))
            except Exception as reason:  # NotKept, or something that is not there in this version of PyTorch
                self.refused.append(f"{type(reason).__name__}: {reason}")
        return result

    def note(self, compile: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
        """``compile()``, called while PyTorch traces within :meth:`watch`; what it returns is noted when it runs."""
        if getattr(self._here, "named", None) is None:
            return compile()
        loaded = _loaded_modules()
        compiled = compile()
        try:
            note = self._noted(loaded)
            self._here.sight = Sight.of(note, self._here.named)
        except Exception as reason:  # NotKept, or something that is not there in this version of PyTorch
            self.refused.append(f"{type(reason).__name__}: {reason}")
            return compiled
        self._unseen.append(note)

        def run(*tensors: Any) -> Any:
            outputs, sight = compiled(*tensors), getattr(self._here, "sight", None)
            if sight is not None and sight.note is note:
                sight.seen = tensors, outputs
            return outputs

        return run

    def _noted(self, loaded: list[Any]) -> Note:
        """What was compiled since ``loaded``."""
        made = [module for module in _loaded_modules() if module not in loaded]
        found = generated(made[0], native.compiler_folder()) if len(made) == 1 else None
        if found is None:
            raise NotKept("what the compiler generated needs the compiler")
        traced = TracingContext.get()
        files = sources(traced.traced_code) | {module: digest(module) for module in MADE_BY}
        return Note.of(found, list(traced.guards_context.dynamo_guards), files, self._here.named)

    def _met(self, named: dict[str, Any]) -> Note | None:
        """What these arguments are the first for: it was compiled, and not run."""
        for note in self._unseen:
            try:
                if note.read(named) == note.values:
                    return note
            except Exception:  # another structure
                continue
        return None

    def _add(self, told: Told) -> None:
        """Take up a call, if what its code was traced from is as it was."""
        try:
            if not is_current(told):
                return
            outer = [tuple(condition) for condition in told["outer"]]
            if outer_values(outer, self._function.__globals__) != told["outer_values"]:
                return
            place = json.dumps([told["conditions"], told["state"]])
            if place not in self._forms:
                self._forms[place] = Form(reader([tuple(c) for c in told["conditions"]]), told["state"])
            self._forms[place].calls[from_json(told["values"])] = Ready(told, picker(told["inputs"]))
        except (NotKept, LookupError, AttributeError, ImportError, TypeError, ValueError, SyntaxError):
            return  # of another version: it is compiled anew

    def _is_loaded(self, ready: Ready, form: Form) -> bool:
        if ready.call is not None:
            return True
        assert self._folder is not None
        try:
            ready.call = Generated(**ready.told["generated"]).load(self._libraries, self._folder)
        except (OSError, ImportError, LookupError, SyntaxError, TypeError):
            form.calls = {key: other for key, other in form.calls.items() if other is not ready}
            return False
        return True


def name_of_call(told: Told) -> str:
    """A digest of a kept call."""
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def is_current(told: Told) -> bool:
    """Whether the files that a call was traced from are as they were."""
    return all(digest(module) == was for module, was in told["files"].items())


def of_kind(calls: list[Told], function: Any) -> list[Told]:
    """Those whose module has this ``forward``."""
    return [call for call in calls if call.get("kind") == name_of(function)]


def _rebuilt(form: Any, made: Any) -> Any:
    if isinstance(form, int):
        return made[form]
    if form is None:
        return None
    items = [_rebuilt(item, made) for item in form[1]]
    return tuple(items) if form[0] == "tuple" else items


def _loaded_modules() -> list[Any]:
    """What the compiler generated so far in this process; nothing where this version of PyTorch keeps it elsewhere."""
    from torch._inductor import codecache

    return list(getattr(getattr(codecache, "PyCodeCache", None), "modules", ()))
