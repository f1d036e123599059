"""The steps of a key map that look at one tensor at a time: rules for names, and entries that drop or reshape.

Rules are regular expressions. Entries name keys with ``*`` for any text. (Splitting and fusing: ``keymap_parts``.)
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from flashdreams.core.checkpoint.keymap_patterns import compile_glob, compile_regex, invert_rule
from flashdreams.core.checkpoint.keymap_tensors import KeyMapError, Names, Planned, Swap, View, collect, resolve_view

WRAPPERS = ("model", "module", "net", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
"""Parts of a key that training wrappers and compilers put in, and that say nothing about the model."""


@dataclass(frozen=True)
class Rule:
    """``re.sub(pattern, replacement, key)`` on every key."""

    pattern: str
    replacement: str

    def __post_init__(self) -> None:
        try:
            self._regex.sub(self.replacement, "")
            re.compile(self.pattern + "|").sub(self.replacement, "")
        except (re.error, IndexError) as error:
            raise KeyMapError(f"rule {self.pattern!r} -> {self.replacement!r}: {error}") from None

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        return compile_regex(self.pattern)

    def rename(self, key: str) -> str:
        return self._regex.sub(self.replacement, key)

    def run(self, names: Names) -> Names:
        return collect((self.rename(key), tensor) for key, tensor in names.items())

    def inverse(self) -> Rule:
        return Rule(*invert_rule(self.pattern, self.replacement))


@dataclass(frozen=True)
class Strip:
    """Take wrappers out of every key.

    Args:
        anywhere: parts (between dots) that are taken out wherever they occur.
        leading: parts taken out only before the first part that is no wrapper. A name that the target itself uses
            deeper in its keys belongs here; one it begins with belongs in neither.
    """

    anywhere: tuple[str, ...] = WRAPPERS
    leading: tuple[str, ...] = ()

    @classmethod
    def before(cls, targets: Iterable[str], wrappers: tuple[str, ...] = WRAPPERS) -> Strip:
        """The wrappers that can be taken out without touching a part that one of the keys ``targets`` really has."""
        paths = [key.split(".") for key in targets]
        first, deeper = {path[0] for path in paths}, {part for path in paths for part in path[1:]}
        free = tuple(name for name in wrappers if name not in first)
        return cls(tuple(name for name in free if name not in deeper), tuple(name for name in free if name in deeper))

    def rename(self, key: str) -> str:
        *parents, name = key.split(".")
        start = next((at for at, part in enumerate(parents) if part not in (*self.anywhere, *self.leading)), None)
        if start is None:
            return name
        return ".".join([*(part for part in parents[start:] if part not in self.anywhere), name])

    def run(self, names: Names) -> Names:
        return collect((self.rename(key), tensor) for key, tensor in names.items())

    def inverse(self) -> Strip:
        raise KeyMapError("stripping wrappers has no inverse: where they stood is not kept")


@dataclass(frozen=True)
class Drop:
    """Leave out the keys that match, because of ``why``."""

    pattern: str
    why: str = ""

    def run(self, names: Names) -> Names:
        regex = compile_glob(self.pattern)
        return {key: tensor for key, tensor in names.items() if not regex.fullmatch(key)}

    def inverse(self) -> Drop:
        raise KeyMapError(f"dropping {self.pattern!r} has no inverse: the tensors are gone")


@dataclass(frozen=True)
class Transpose:
    """Exchange two axes of the tensors that match."""

    pattern: str
    axes: tuple[int, int] = (0, 1)

    def run(self, names: Names) -> Names:
        regex = compile_glob(self.pattern)
        return {key: self._swap(key, tensor) if regex.fullmatch(key) else tensor for key, tensor in names.items()}

    def _swap(self, key: str, tensor: Planned) -> Swap:
        if max(self.axes) >= len(tensor.shape):
            raise KeyMapError(f"{key!r} is {list(tensor.shape)}; it has no axes {self.axes} to transpose")
        return Swap(tensor, self.axes)

    def inverse(self) -> Transpose:
        return self


@dataclass(frozen=True)
class Reshape:
    """View the tensors that match, of shape ``before``, in shape ``after``; one size of each may be -1, any."""

    pattern: str
    before: tuple[int, ...]
    after: tuple[int, ...]

    def run(self, names: Names) -> Names:
        regex = compile_glob(self.pattern)
        return {key: self._view(key, tensor) if regex.fullmatch(key) else tensor for key, tensor in names.items()}

    def _view(self, key: str, tensor: Planned) -> View:
        shape = resolve_view(tensor.shape, self.after)
        if resolve_view(tensor.shape, self.before) != tensor.shape or shape is None:
            raise KeyMapError(
                f"{key!r} is {list(tensor.shape)}; expected {list(self.before)}, to view it as {list(self.after)}"
            )
        return View(tensor, shape)

    def inverse(self) -> Reshape:
        return Reshape(self.pattern, self.after, self.before)
