"""Tensors that a key map has planned but not read: shapes now, values when someone hands over the sources.

A planned tensor is a small tree of frozen values, so a plan can be made from a header alone, printed and compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flashdreams.core.checkpoint.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]
Read = Callable[[str], "Tensor"]


class KeyMapError(CheckpointError):
    """A key map does not fit the keys, or cannot be inverted. The message names the keys and says why."""


@dataclass(frozen=True)
class Source:
    """The tensor of the checkpoint called ``key``, as it is."""

    key: str
    shape: Shape

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.key,)

    def __call__(self, read: Read) -> Tensor:
        return read(self.key)


@dataclass(frozen=True)
class Slice:
    """``length`` rows of ``of`` from ``start`` on, along ``dim``; a copy, so that parts share no memory."""

    of: Planned
    dim: int
    start: int
    length: int

    @property
    def shape(self) -> Shape:
        return (*self.of.shape[: self.dim], self.length, *self.of.shape[self.dim + 1 :])

    @property
    def sources(self) -> tuple[str, ...]:
        return self.of.sources

    def __call__(self, read: Read) -> Tensor:
        return self.of(read).narrow(self.dim, self.start, self.length).clone()


@dataclass(frozen=True)
class Join:
    """``parts`` one after the other along ``dim``."""

    parts: tuple[Planned, ...]
    dim: int

    @property
    def shape(self) -> Shape:
        first = self.parts[0].shape
        return (*first[: self.dim], sum(part.shape[self.dim] for part in self.parts), *first[self.dim + 1 :])

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(key for part in self.parts for key in part.sources))

    def __call__(self, read: Read) -> Tensor:
        import torch  # only here: a key map is data, and its module is read where there is no torch

        return torch.cat([part(read) for part in self.parts], self.dim)


@dataclass(frozen=True)
class Swap:
    """``of`` with two axes exchanged, contiguous."""

    of: Planned
    axes: tuple[int, int]

    @property
    def shape(self) -> Shape:
        shape = list(self.of.shape)
        first, second = self.axes
        shape[first], shape[second] = shape[second], shape[first]
        return tuple(shape)

    @property
    def sources(self) -> tuple[str, ...]:
        return self.of.sources

    def __call__(self, read: Read) -> Tensor:
        return self.of(read).transpose(*self.axes).contiguous()


@dataclass(frozen=True)
class View:
    """The elements of ``of``, in their order, in another shape."""

    of: Planned
    shape: Shape

    @property
    def sources(self) -> tuple[str, ...]:
        return self.of.sources

    def __call__(self, read: Read) -> Tensor:
        return self.of(read).reshape(self.shape)


Planned = Source | Slice | Join | Swap | View
Names = dict[str, Planned]
"""What is planned so far, by the name it has at this point of the map."""


@dataclass(frozen=True)
class PlanItem:
    """One tensor of the target: its key, and how it comes out of the checkpoint."""

    target: str
    tensor: Planned

    @property
    def sources(self) -> tuple[str, ...]:
        """The checkpoint's keys it needs, in the order in which :meth:`operation` takes their tensors."""
        return self.tensor.sources

    @property
    def shape(self) -> Shape:
        return self.tensor.shape

    @property
    def is_rename(self) -> bool:
        """Whether the tensor is passed on untouched."""
        return isinstance(self.tensor, Source)

    def operation(self, *tensors: Tensor) -> Tensor:
        """The target's tensor from those of :attr:`sources`; a pure rename returns the very tensor it was given."""
        return self.tensor(dict(zip(self.sources, tensors, strict=True)).__getitem__)


def shape_of(value: Any) -> Shape:
    """The shape that ``value`` has (a tensor, real or meta) or is (a header's list of sizes)."""
    return tuple(int(size) for size in getattr(value, "shape", value))


def resolve_view(shape: Sequence[int], pattern: Sequence[int]) -> Shape | None:
    """``pattern`` with its one ``-1`` filled in so that it holds as many elements as ``shape``; ``None`` if none does.

    >>> resolve_view((257, 1280), (1, -1, 1280))
    (1, 257, 1280)
    """
    known, total = math.prod(size for size in pattern if size != -1), math.prod(shape)
    if -1 not in pattern:
        return tuple(pattern) if known == total else None
    if not known or total % known:
        return None
    return tuple(total // known if size == -1 else size for size in pattern)


def collect(pairs: Iterable[tuple[str, Planned]]) -> Names:
    """``dict(pairs)``, but two tensors of one name are an error that names both."""
    names: Names = {}
    for key, tensor in pairs:
        if key in names:
            first, second = names[key].sources[0], tensor.sources[0]
            raise KeyMapError(
                f"{first!r} and {second!r} both become {key!r}; drop one, or make the rule that joins them more exact"
            )
        names[key] = tensor
    return names
