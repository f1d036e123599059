"""Modules built without memory for their weights, whose other tensors survive."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

_FILLS = {
    "normal_", "uniform_", "random_", "exponential_", "fill_", "zero_", "add_", "sub_", "mul_", "div_", "clamp_",
    "erfinv_",
}  # fmt: skip
"""Methods that give values and keep the shape."""


@contextmanager
def parameters_on_meta() -> Generator[None]:
    """Modules built inside have their parameters on the meta device, and everything else as their code makes it.

    The meta device as a default would take the tables and masks that a constructor computes along with the weights, and
    no checkpoint brings them back. Here a parameter moves to meta when it is registered; until then it is memory that
    was asked for and not touched. Initialising what is on meta is left out: there is nothing to fill, and PyTorch would
    import its compiler for it, which takes longer than to read a small model. Other threads are left alone.
    """
    thread = threading.get_ident()

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if threading.get_ident() != thread or parameter is None or parameter.is_meta:
            return None
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    hook = register_module_parameter_registration_hook(to_meta)  # ty: ignore[invalid-argument-type]  (may return a value)
    try:
        with _NoValues():
            yield
    finally:
        hook.remove()


class _NoValues(TorchFunctionMode):
    """Operations that only give values to a tensor do nothing to one on the meta device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _FILLS or getattr(func, "__module__", None) == "torch.nn.init":
            target = args[0] if args else kwargs.get("tensor")
            if isinstance(target, Tensor) and target.is_meta:
                return target
        return func(*args, **kwargs)


def lost_tensors(module: nn.Module) -> list[str]:
    """Names of all tensors of ``module`` that have no values: parameters, buffers, and plain attributes."""
    named: list[tuple[str, Tensor]] = [*module.named_parameters(), *module.named_buffers()]
    for prefix, part in module.named_modules():
        for name, value in vars(part).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                named += _inside(f"{prefix}.{name}".lstrip("."), value)
    return [name for name, tensor in named if tensor.is_meta]


def _inside(name: str, value: Any) -> Iterable[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _inside(f"{name}[{key!r}]", item)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _inside(f"{name}[{index}]", item)
