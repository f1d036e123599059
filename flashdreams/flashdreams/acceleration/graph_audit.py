"""What a pass must not do if it is to be captured, found by watching one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flashdreams.acceleration.graph_tree import NotGraphable

_SYNCHRONISES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Audit(TorchDispatchMode):
    """Refuses a pass that reads tensors it was not given, waits for the device, or writes into its inputs.

    A graph reads the addresses of its capture for good: a tensor that the pass finds elsewhere (kept from an earlier
    pass, made from numbers of the host) would be read again when it is stale, or freed. Compiled code must run
    uncompiled under it (:func:`torch.compiler.set_stance`): nothing of it would be seen, and a function that is called
    for the first time under such a mode is never compiled any more.

    Args:
        known: what the pass may read: inputs, weights, state of the rollout.
        inputs: those of them that it may not change.
    """

    def __init__(self, known: Iterable[Tensor], inputs: Iterable[Tensor]) -> None:
        super().__init__()
        self._known = {_storage(tensor) for tensor in known}
        self._inputs = {_storage(tensor) for tensor in inputs}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self._check(func, args, kwargs, given)
        result = func(*args, **kwargs)
        self._known.update(_storage(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        return result

    def _check(self, func: Any, args: Any, kwargs: Any, given: list[Tensor]) -> None:
        if func is torch.ops.aten.lift_fresh.default:
            raise NotGraphable("it makes a tensor from numbers of the host in every pass")
        if _SYNCHRONISES & set(func.tags) and not _index_by_integers(func, args):
            raise NotGraphable(f"{func} waits for the device's results")
        if len({tensor.device for tensor in given if tensor.ndim or tensor.device.type != "cpu"}) > 1:
            raise NotGraphable(f"{func} copies between the host and the device")
        for tensor in given:
            if tensor.numel() and _storage(tensor) not in self._known:
                raise NotGraphable(
                    f"{func} reads a {tensor.dtype} tensor of shape {list(tensor.shape)} that is no argument, no "
                    "weight and no state of the rollout"
                )
        for argument, value in zip(func._schema.arguments, args, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and isinstance(value, Tensor) and _storage(value) in self._inputs:
                raise NotGraphable(f"{func} writes into one of its inputs")


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _index_by_integers(func: Any, args: Any) -> bool:
    """Indexing is tagged as if a mask chose the elements; by integers its size is known."""
    if func is not torch.ops.aten.index.Tensor:
        return False
    return all(index is None or index.dtype not in (torch.bool, torch.uint8) for index in args[1])
