"""What meta kernels answered, remembered: many are written in Python, and every block of a model asks them the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

_SIMPLE = (int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class MetaMemo:
    """Calls operations on meta tensors. One that was called before with tensors of the same shapes, strides and dtypes,
    and otherwise equal arguments, is not called again: its result is made from what it was then.

    Operations that take other tensors, or of which the schema does not say what they return, are called each time.
    """

    def __init__(self) -> None:
        self._known: dict[Any, Callable[[Any], Any]] = {}

    def __call__(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of ``func``: new tensors, or a view of its first argument, or that argument itself."""
        kind = _kind(func)
        key = None if kind is None else _key((*args, *kwargs.items()))
        if key is None:
            return func(*args, **kwargs)
        again = self._known.get((func, key))
        if again is not None:
            return again(args)
        made = func(*args, **kwargs)
        recipe = _RECIPES[kind](made, args)
        reshaped = _key((*args, *kwargs.items())) != key  # in place, as unsqueeze_ does
        if recipe is not None and not reshaped:
            self._known[func, key] = recipe
        return made


@cache
def _kind(func: Any) -> str | None:
    """What the operation returns by its schema: ``new`` tensors, a ``view`` of its first argument, or the ``written``
    first argument; ``None``: something else."""
    schema = func._schema
    returns, (first, *others) = schema.returns, schema.arguments or (None,)
    if first is None or not returns or any(str(value.type) != "Tensor" for value in returns):
        return None
    if any(argument.alias_info is not None for argument in others):
        return None
    aliases = [value.alias_info for value in returns]
    if first.alias_info is None:
        return "new" if not any(aliases) else None
    if len(aliases) != 1 or aliases[0] is None or str(first.type) != "Tensor":
        return None
    return "written" if first.alias_info.is_write else "view"


def _key(value: Any) -> Any:
    """Equal for what a meta kernel cannot tell apart; ``None`` where that is not known."""
    if isinstance(value, Tensor):
        if not value.is_meta or type(value) not in (Tensor, nn.Parameter, nn.Buffer) or value.is_conj():
            return None
        return value.shape, value.stride(), value.dtype
    if isinstance(value, list | tuple):
        keys = tuple(map(_key, value))
        return None if None in keys else keys
    return (type(value), value) if isinstance(value, _SIMPLE) else None  # 1, 1.0 and True are equal


def _new(made: Any, args: Any) -> Callable[[Any], Any] | None:
    tensors = made if isinstance(made, tuple) else (made,)
    if any(not tensor.is_meta or tensor.is_conj() for tensor in tensors):
        return None
    memory = [tensor.untyped_storage()._cdata for tensor in tensors]
    given = [value.untyped_storage()._cdata for value in tree_leaves(args) if isinstance(value, Tensor)]
    if memory == given[:1]:  # views that the schema does not call so, such as _unsafe_view
        return _view(made, args)
    if set(memory) & set(given) or len(set(memory)) < len(memory):
        return None
    facts = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors]
    if isinstance(made, tuple):
        return lambda args: tuple(_empty(*fact) for fact in facts)
    return lambda args: _empty(*facts[0])


def _empty(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="meta")


def _view(made: Any, args: Any) -> Callable[[Any], Any] | None:
    viewed = args[0]
    if not isinstance(viewed, Tensor) or made.dtype != viewed.dtype or made.is_conj() or made.is_neg():
        return None
    size, stride, offset = made.shape, made.stride(), made.storage_offset() - viewed.storage_offset()
    return lambda args: args[0].as_strided(size, stride, args[0].storage_offset() + offset)


def _written(made: Any, args: Any) -> Callable[[Any], Any] | None:
    return _first if made is args[0] else None


def _first(args: Any) -> Any:
    return args[0]


_RECIPES: dict[Any, Callable[[Any, Any], Callable[[Any], Any] | None]] = {
    "new": _new, "view": _view, "written": _written
}  # fmt: skip
