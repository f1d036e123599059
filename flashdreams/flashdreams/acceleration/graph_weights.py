"""Where the weights of a module lie: graphs hold their addresses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn


class Weights:
    """Where the weights of a module lie."""

    def __init__(self, module: nn.Module) -> None:
        self._holders: list[tuple[Any, str]] = [
            (holder, name)
            for part in module.modules()
            for holder in (part._parameters, part._buffers)
            for name, tensor in holder.items()
            if tensor is not None
        ]
        self._places = self._now()

    def __iter__(self) -> Iterator[Tensor]:
        """Their tensors, those inside of quantized weights too."""
        for holder, name in self._holders:
            yield from _inner(holder[name])

    def moved(self) -> bool:
        """Whether one of them lies elsewhere than at the last call, or has another dtype."""
        before, self._places = self._places, self._now()
        return before != self._places

    def _now(self) -> list[Any]:
        tensors = [holder[name] for holder, name in self._holders]
        return [(t.data_ptr(), t.dtype) if type(t) in (nn.Parameter, Tensor) else id(t) for t in tensors]


def _inner(tensor: Any) -> Iterator[Tensor]:
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _inner(getattr(tensor, name))
