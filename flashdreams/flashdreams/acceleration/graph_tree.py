"""Trees of arguments: their tensors apart from everything else, and the whole again around other tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

from torch import Tensor

HOST_FIELDS = frozenset({"start"})
"""Fields that count up with a rollout. They are no part of what a graph is keyed by, and a pass must not read them: a
graph would go on with the value of its capture."""


class NotGraphable(Exception):
    """Why a pass cannot be captured."""


class HostOnly:
    """Stands in a captured pass for a value that differs from chunk to chunk; whatever reads it is told so."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _refuse(self, *_: Any) -> NoReturn:
        raise NotGraphable(f"it reads {self._name!r}, which counts up with the rollout, and a graph would freeze it")

    __index__ = __int__ = __float__ = __bool__ = __hash__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __floordiv__ = __mod__ = __neg__ = _refuse
    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse


def flatten(
    tree: Any, state: Mapping[int, str] = MappingProxyType({}), host: frozenset[str] = frozenset()
) -> tuple[list[Tensor], Hashable]:
    """The tensors of ``tree``, and a hashable description of the rest: what :func:`rebuild` needs, and what a graph
    depends on beside the values of the tensors.

    Args:
        state: nodes by ``id`` that stay as they are, with their names.
        host: names of fields whose values are left out (:data:`HOST_FIELDS`).

    Raises:
        NotGraphable: something in it cannot be compared.
    """
    tensors: list[Tensor] = []

    def describe(tree: Any) -> Hashable:
        if isinstance(tree, Tensor):
            tensors.append(tree)
            return Tensor, tuple(tree.shape), tree.dtype, tree.device
        if tree is None or isinstance(tree, (bool, int, float, str)):
            return "value", type(tree), tree
        if (name := state.get(id(tree))) is not None:
            return "state", name
        if isinstance(tree, dict):
            return dict, tuple(tree), tuple(map(describe, tree.values()))
        if isinstance(tree, (list, tuple)):
            return type(tree), tuple(map(describe, tree))
        if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
            names = tuple(field.name for field in dataclasses.fields(tree))
            children = (("host", name) if name in host else describe(getattr(tree, name)) for name in names)
            return "dataclass", type(tree), names, tuple(children)
        try:
            hash(tree)
        except TypeError:
            raise NotGraphable(f"it has a {type(tree).__name__}, which cannot be compared with the last one") from None
        return "value", type(tree), tree

    return tensors, describe(tree)


def rebuild(description: Any, tensors: Sequence[Tensor], state: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """The tree of ``description`` around ``tensors``, in fresh containers.

    Args:
        state: the nodes that were left as they are, by name.
    """
    return _build(description, iter(tensors), state)


def _build(description: Any, tensors: Iterator[Tensor], state: Mapping[str, Any]) -> Any:
    kind, *content = description
    if kind is Tensor:
        return next(tensors)
    if kind == "value":
        return content[1]
    if kind == "host":
        return HostOnly(content[0])
    if kind == "state":
        return state[content[0]]
    if kind is dict:
        return {key: _build(item, tensors, state) for key, item in zip(content[0], content[1], strict=True)}
    if kind == "dataclass":
        cls, names, children = content
        made = object.__new__(cls)
        for name, child in zip(names, children, strict=True):
            object.__setattr__(made, name, _build(child, tensors, state))  # also of a frozen one
        return made
    items = [_build(item, tensors, state) for item in content[0]]
    return kind(*items) if hasattr(kind, "_fields") else kind(items)
