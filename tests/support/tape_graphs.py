"""CUDA graphs on the CPU: a tape of operations, replayed on the very tensors of its recording.

As on a GPU, nothing of Python runs again: a tensor that was replaced since, or a number that was baked in, stays as it
was at the recording.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Tape(TorchDispatchMode):
    """What was done within it, ready to be done again."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, list[Tensor | None]]] = []
        """Function, arguments, keyword arguments, and the tensors it made (``None``: part of one of its arguments)."""
        self.replays = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        result = func(*args, **kwargs)
        given = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        made = [leaf if _storage(leaf) not in given else None for leaf in _tensors(result)]
        self.operations.append((func, args, kwargs, made))
        return result

    @torch.no_grad()
    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, made in self.operations:
            for old, new in zip(made, _tensors(func(*args, **kwargs)), strict=True):
                if old is not None:
                    old.copy_(new)


class TapeBackend:
    """A graph backend of tapes. ``tapes`` are those in use."""

    def __init__(self) -> None:
        self.tapes: list[Tape] = []
        self.warm_ups = 0

    def warm_up(self, run: Callable[[], Any]) -> None:
        self.warm_ups += 1
        run()

    def capture(self, run: Callable[[], Any]) -> tuple[Tape, Any]:
        tape = Tape()
        with torch.compiler.set_stance("force_eager"), tape:  # of compiled code nothing would be seen
            output = run()
        self.tapes.append(tape)
        return tape, output

    def discard(self, graphs: Iterable[Any]) -> None:
        for graph in graphs:
            self.tapes.remove(graph)
            graph.operations = [(_gone, (), {}, [])]


def _gone() -> None:
    raise AssertionError("a discarded graph was replayed")


def _tensors(result: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
