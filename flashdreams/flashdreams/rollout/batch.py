"""Records of many samples at once: dataclasses whose fields say what becomes of them when samples are picked or joined.

A field is *concat* (one entry per sample: tensors on their first axis, lists, dicts of such, other batches), *shared*
(the same for all samples), or *each* (a list of batches of the same samples, joined place by place). What is of another
length in every sample stands in a :class:`Packed`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

B = TypeVar("B", bound="Batch")


CONCAT = {"kind": "concat"}
"""``field(metadata=CONCAT)`` has one entry per sample."""
EACH = {"kind": "each"}
"""``field(metadata=EACH)`` is a list of batches, each of all samples. What says neither is shared."""


@dataclass(frozen=True)
class Packed:
    """Tensors that differ in the length of their first axis, end to end: ``values`` ``[sum(lengths), ...]``."""

    values: Tensor
    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        if sum(self.lengths) != len(self.values):
            raise ValueError(f"lengths {list(self.lengths)} do not add up to the {len(self.values)} rows of values")

    @staticmethod
    def of(tensors: Sequence[Tensor]) -> Packed:
        """One entry per sample."""
        if isinstance(tensors, Tensor) or not tensors:
            raise TypeError(f"{type(tensors).__name__} cannot be packed; give a list of one tensor per sample")
        return Packed(torch.cat(list(tensors)), tuple(len(tensor) for tensor in tensors))

    def unpack(self) -> list[Tensor]:
        """The tensors, as views."""
        return list(self.values.split(self.lengths))

    def __len__(self) -> int:
        return len(self.lengths)


class Batch:
    """Base of such dataclasses. Nothing but declared fields survives: what is picked or joined is made anew."""

    @property
    def batch_size(self) -> int:
        """How many samples there are.

        Raises:
            ValueError: fields disagree, or none tells.
        """
        sizes = {name: size for name, size in self._sizes("") if size is not None}
        if len(set(sizes.values())) != 1:
            found = ", ".join(f"{name}: {size}" for name, size in sizes.items())
            raise ValueError(
                f"the samples of {type(self).__name__} cannot be counted; its fields say {found or 'none'}"
            )
        return next(iter(sizes.values()))

    def select(self, indices: Sequence[int] | Tensor) -> Self:
        """The samples at ``indices``, in that order; one may come several times."""
        picked, size = [int(index) for index in indices], self.batch_size
        if wrong := [index for index in picked if not -size <= index < size]:
            raise IndexError(f"sample {wrong[0]} was asked of {size}")
        return self._walk(lambda value: _select(value, [index % size for index in picked]))

    def slice(self, start: int, stop: int) -> Self:
        """Samples ``[start, stop)``."""
        return self.select(range(*slice(start, stop).indices(self.batch_size)))

    def chunk(self, count: int) -> list[Self]:
        """``count`` parts of as many samples each.

        Raises:
            ValueError: they cannot be dealt out evenly.
        """
        size = self.batch_size
        if count < 1 or size % count:
            raise ValueError(f"{size} samples cannot be cut into {count} equal parts")
        part = size // count
        return [self.slice(start, start + part) for start in range(0, size, part)]

    def repeat_interleave(self, count: int) -> Self:
        """Every sample ``count`` times, the copies of one side by side."""
        if count < 1:
            raise ValueError(f"count is {count}; expected 1 or more")
        return self.select([index for index in range(self.batch_size) for _ in range(count)])

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """``function`` of every tensor that there is one of per sample, such as ``lambda t: t.cpu()``."""
        return self._walk(lambda value: _map(value, function))

    @classmethod
    def concat(cls, items: Sequence[Self]) -> Self:
        """The samples of all ``items``, in order.

        Raises:
            ValueError: there are no items, or what samples share differs between them; with the field's name.
        """
        if not items:
            raise ValueError(f"nothing was given to make a {cls.__name__} of")
        return items[0] if len(items) == 1 else _join(list(items), cls.__name__)

    def _walk(self, function: Callable[[Any], Any]) -> Self:
        changes: dict[str, Any] = {}
        for field, value in self._values():
            kind = field.metadata.get("kind")
            if value is not None and kind == "concat":
                changes[field.name] = function(value)
            elif value is not None and kind == "each":
                changes[field.name] = [item._walk(function) for item in value]
        return dataclasses.replace(self, **changes)  # ty: ignore[invalid-argument-type]

    def _sizes(self, path: str) -> list[tuple[str, int | None]]:
        found: list[tuple[str, int | None]] = []
        for field, value in self._values():
            name, kind = f"{path}{field.name}", field.metadata.get("kind")
            if kind == "concat":
                found += _sizes(value, name)
            elif kind == "each":
                found += [size for i, item in enumerate(value) for size in item._sizes(f"{name}[{i}].")]
        return found

    def _values(self) -> list[tuple[dataclasses.Field[Any], Any]]:
        return [(field, getattr(self, field.name)) for field in dataclasses.fields(self)]  # ty: ignore[invalid-argument-type]


def _sizes(value: Any, name: str) -> list[tuple[str, int | None]]:
    if isinstance(value, Batch):
        return value._sizes(f"{name}.")
    if isinstance(value, Mapping):
        return [size for key, item in value.items() for size in _sizes(item, f"{name}.{key}")]
    return [(name, None if value is None else len(value))]


def _select(value: Any, indices: list[int]) -> Any:
    if isinstance(value, Batch):
        return value.select(indices)
    if isinstance(value, Mapping):
        return {key: None if item is None else _select(item, indices) for key, item in value.items()}
    if isinstance(value, Packed):
        rows = value.unpack()
        return Packed.of([rows[index] for index in indices]) if indices else Packed(value.values[:0], ())
    if isinstance(value, Tensor):
        return value[torch.tensor(indices, dtype=torch.long, device=value.device)]
    return type(value)(value[index] for index in indices)


def _map(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Batch):
        return value.map(function)
    if isinstance(value, Mapping):
        return {key: None if item is None else _map(item, function) for key, item in value.items()}
    if isinstance(value, Packed):
        return Packed(function(value.values), value.lengths)
    return function(value) if isinstance(value, Tensor) else value


def _join(items: list[Any], name: str) -> Any:
    first = items[0]
    if any(type(item) is not type(first) for item in items):
        kinds = ", ".join(sorted({type(item).__name__ for item in items}))
        raise ValueError(f"{name} is of several kinds: {kinds}; expected one")
    if first is None:
        return None
    if isinstance(first, Batch):
        return _join_fields(items, name)
    if isinstance(first, Mapping):
        keys = {key: None for item in items for key in item}
        if any(item.keys() != keys.keys() for item in items):
            raise ValueError(f"{name} has other entries in one part than in another: {', '.join(map(str, keys))}")
        return {key: _join([item[key] for item in items], f"{name}.{key}") for key in keys}
    if isinstance(first, Packed):
        return Packed(torch.cat([item.values for item in items]), tuple(n for item in items for n in item.lengths))
    if not isinstance(first, Tensor):
        return type(first)(entry for item in items for entry in item)
    if any(item.shape[1:] != first.shape[1:] for item in items):
        shapes = [list(item.shape) for item in items]
        raise ValueError(f"{name} has shapes {shapes}, which differ beyond the samples; sort samples by shape first")
    return torch.cat(items)


def _join_fields(items: list[Any], name: str) -> Any:
    changes: dict[str, Any] = {}
    for field, value in items[0]._values():
        label, kind = f"{name}.{field.name}", field.metadata.get("kind")
        values = [getattr(item, field.name) for item in items]
        if kind == "concat":
            changes[field.name] = _join(values, label)
        elif kind == "each":
            if len({len(each) for each in values}) > 1:
                raise ValueError(
                    f"{label} has {' and '.join(str(len(each)) for each in values)} entries; expected equal"
                )
            changes[field.name] = [_join(list(row), f"{label}[{i}]") for i, row in enumerate(zip(*values, strict=True))]
        elif any(each != value for each in values):
            raise ValueError(f"{label} differs between what is to be joined: {value!r:.60} and others")
    return dataclasses.replace(items[0], **changes)
