"""How the keys and tensors of one checkpoint layout become those of another: data, not code.

A :class:`KeyMap` is an ordered list of steps. It works on a header alone (:meth:`KeyMap.plan`), on a whole state dict
of real or meta tensors (:meth:`KeyMap.apply`, the ``state_dict_transform`` of a plugin), and backwards
(:meth:`KeyMap.inverse`), where it loses nothing::

    FROM_DIFFUSERS = KeyMap((
        (r"\\.attn1\\.", ".self_attn."),
        (r"\\.to_(q|k|v)\\.", r".\\1."),
        Drop("*.rope.freqs", why="computed, not learned"),
    ))
    from_diffusers = FROM_DIFFUSERS.apply
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flashdreams.core.checkpoint.keymap_parts import Fuse, Split
from flashdreams.core.checkpoint.keymap_steps import WRAPPERS, Drop, Reshape, Rule, Strip, Transpose
from flashdreams.core.checkpoint.keymap_tensors import KeyMapError, Names, PlanItem, Source, shape_of

__all__ = [
    "WRAPPERS",
    "Drop",
    "Fuse",
    "KeyMap",
    "KeyMapError",
    "PlanItem",
    "Reshape",
    "Rule",
    "Split",
    "Strip",
    "Transpose",
    "keyshape_md5",
]

Step = Rule | Strip | Drop | Split | Fuse | Transpose | Reshape


@dataclass(frozen=True, init=False)
class KeyMap:
    """Ordered steps from the keys of a checkpoint to those of a target."""

    steps: tuple[Step, ...]
    undoes: KeyMap | None = field(default=None, repr=False)
    """For an inverse: the map it must agree with, key for key."""

    def __init__(self, steps: Iterable[Step | tuple[str, str]] = (), undoes: KeyMap | None = None) -> None:
        """A pair of texts among ``steps`` is a :class:`Rule`."""
        rules = tuple(Rule(*step) if isinstance(step, tuple) else step for step in steps)
        object.__setattr__(self, "steps", rules)
        object.__setattr__(self, "undoes", undoes)

    def plan(self, header: Mapping[str, Any]) -> list[PlanItem]:
        """What becomes of every tensor, from names and shapes alone.

        Args:
            header: by key, a shape, or anything that has one (a tensor, real or meta; an entry of a file's header).

        Returns:
            One item per key of the target, in the order of the checkpoint, so that a loader can read, cast and place
            tensors one by one.

        Raises:
            KeyMapError: two keys become one, a part of a fused tensor is missing, or a shape does not fit its entry.
        """
        names: Names = {key: Source(key, shape_of(value)) for key, value in header.items()}
        for step in self.steps:
            names = step.run(names)
        items = [PlanItem(key, tensor) for key, tensor in names.items()]
        if self.undoes is not None:
            self._check_round_trip(self.undoes, header, items)
        return items

    def apply(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The state dict with the target's keys: tensors from tensors (real or meta), shapes from shapes.

        A tensor that is only renamed is passed on, not copied. Raises as :meth:`plan` does.
        """
        items = self.plan(state)
        if not all(hasattr(value, "reshape") for value in state.values()):
            return {item.target: item.shape for item in items}
        return {item.target: item.tensor(state.__getitem__) for item in items}

    def shapes(self, header: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """:meth:`plan` reduced to the target's keys and shapes."""
        return {item.target: item.shape for item in self.plan(header)}

    def inverse(self) -> KeyMap:
        """The map back. Planning with it proves, key for key, that this map leads to where it started.

        Raises:
            KeyMapError: a step loses something; the message names the step and what is lost.
        """
        return KeyMap(tuple(step.inverse() for step in reversed(self.steps)), undoes=self)

    def then(self, after: KeyMap) -> KeyMap:
        """This map followed by ``after``."""
        return KeyMap((*self.steps, *after.steps))

    def source(self, name: str = "KEY_MAP") -> str:
        """Python source that defines the map as ``name``; it needs the names of this module."""
        lines = [f"    {_literal(step)},\n" for step in self.steps]
        return f"{name} = KeyMap((\n{''.join(lines)}))\n"

    @staticmethod
    def _check_round_trip(forward: KeyMap, header: Mapping[str, Any], items: list[PlanItem]) -> None:
        back = {item.target: item for item in items}
        again = forward.plan({item.target: item.shape for item in items})
        for item in again:
            origin = {key for source in item.sources for key in back[source].sources}
            if item.target not in origin or item.shape != shape_of(header[item.target]):
                raise KeyMapError(
                    f"{sorted(origin)[0]!r} goes back to {item.sources[0]!r}, which leads to {item.target!r} "
                    f"{list(item.shape)} instead: these keys are no image of the map"
                )
        if len(again) != len(header):
            lost = next(key for key in header if key not in {item.target for item in again})
            raise KeyMapError(f"{lost!r} cannot be reached by the map, so there is no way back from it")


def keyshape_md5(header: Mapping[str, Any]) -> str:
    """Hash of keys and shapes, as published for many checkpoints: of the sorted list of every ``key`` and every
    ``key:2_3_4``, joined by commas."""
    lines = sorted(text for key, value in header.items() for text in (key, f"{key}:{_underscored(value)}"))
    return hashlib.md5(",".join(lines).encode(), usedforsecurity=False).hexdigest()


def _underscored(value: Any) -> str:
    return "_".join(str(size) for size in shape_of(value))


def _literal(step: Step) -> str:
    if isinstance(step, Rule):
        return f"({_raw(step.pattern)}, {_raw(step.replacement)})"
    return repr(step)


def _raw(text: str) -> str:
    """``text`` as the plainest literal that means it."""
    if "\\" in text and '"' not in text and not text.endswith("\\") and text.isprintable():
        return f'r"{text}"'
    return repr(text)
