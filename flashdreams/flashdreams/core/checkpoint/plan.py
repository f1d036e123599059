"""From what a file holds to what a module needs, decided on shapes alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from flashdreams.core.checkpoint.errors import CheckpointError

StateDict = Mapping[str, Tensor]
Transform = Callable[[StateDict], Mapping[str, Tensor]]


class PlannedTensor(Protocol):
    """One tensor of the module, and how it comes out of the file's."""

    @property
    def target(self) -> str: ...

    @property
    def sources(self) -> tuple[str, ...]: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def operation(self, *tensors: Tensor) -> Tensor: ...


@runtime_checkable
class Planner(Protocol):
    """A transform that says for each tensor what it is made of, so that they can be made one at a time."""

    def plan(self, header: Mapping[str, Any]) -> Iterable[PlannedTensor]: ...


@dataclass(frozen=True)
class Step:
    """One tensor to place: ``meta`` has its shape and number format; without ``operation`` it is the source itself.

    ``sources`` is empty where only the whole transform can make it.
    """

    target: str
    meta: Tensor
    sources: tuple[str, ...] = ()
    operation: Callable[..., Tensor] | None = None


def plan_steps(meta: dict[str, Tensor], transform: Transform | Planner | None) -> list[Step]:
    """The tensors that ``transform`` makes of the file's, which are given on the meta device.

    Raises:
        CheckpointError: the transform does not fit these keys.
    """
    if transform is None:
        return [Step(key, value, (key,)) for key, value in meta.items()]
    name = getattr(transform, "__qualname__", type(transform).__name__)
    try:
        if isinstance(transform, Planner):
            return [_step(item, meta) for item in transform.plan(meta)]
        versions = {key: value._version for key, value in meta.items()}
        result = dict(transform(dict(meta)))
    except CheckpointError:
        raise
    except Exception as error:  # somebody's function, on keys it may never have seen
        what = f"{error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise CheckpointError(f"transform {name} cannot map this checkpoint: {what}") from None
    key_of = {id(value): key for key, value in meta.items() if value._version == versions[key]}
    return [Step(key, value, (key_of[id(value)],) if id(value) in key_of else ()) for key, value in result.items()]


def _step(item: PlannedTensor, meta: dict[str, Tensor]) -> Step:
    """Not by running the operation on meta: joining tensors there imports most of PyTorch's compiler first."""
    dtype = meta[item.sources[0]].dtype
    return Step(item.target, torch.empty(item.shape, dtype=dtype, device="meta"), item.sources, item.operation)
