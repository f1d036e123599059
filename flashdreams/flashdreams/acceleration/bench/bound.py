"""The bound of a computation: its matrix products, convolutions and attention, alone, at the same shapes.

A real run is watched, and what it calls is listed. A bound then makes the same calls on random numbers, with the very
weights, laid out as suits each kernel best; without biases, norms, positions, writes to caches or anything else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


@dataclass(frozen=True)
class Call:
    """One product, convolution or attention: ``inputs`` are the shapes it takes, ``run`` what it does to them."""

    kind: str
    inputs: tuple[tuple[int, ...], ...]
    flops: int
    like: Tensor
    """An empty tensor of their dtype and device."""
    run: Callable[..., Tensor]


class CallRecorder(TorchFunctionMode):
    """While active, lists what is called in ``calls``."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def take(self) -> list[Call]:
        """The calls since the last time."""
        taken, self.calls = self.calls, []
        return taken

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if func is F.linear:
            self.calls.append(_linear(*args, **kwargs))
        elif func is F.scaled_dot_product_attention:
            self.calls.append(_attention(*args, **kwargs))
        elif func in (F.conv1d, F.conv2d, F.conv3d):
            self.calls.append(_convolution(func, made, *args, **kwargs))
        return made


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Call:
    flops = 2 * input.numel() * weight.shape[0]
    return Call("linear", (tuple(input.shape),), flops, input.new_empty(0), lambda x: F.linear(x, weight))


def _attention(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Call:
    shapes = tuple(tuple(x.shape) for x in (query, key, value))
    flops = 2 * math.prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])
    scale = options.get("scale")
    return Call(
        "attention",
        shapes,
        flops,
        query.new_empty(0),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=scale),
    )


def _convolution(
    func: Any, made: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None, *rest: Any, **options: Any
) -> Call:
    flops = 2 * made.numel() * weight[0].numel()
    options.pop("bias", None)
    stride = rest[0] if rest else options.get("stride", 1)
    kernel = tuple(weight.shape[2:])
    if tuple(stride if isinstance(stride, Sequence) else [stride] * len(kernel)) == kernel and made.numel() > 0:
        rows = (made.shape[0], math.prod(made.shape[2:]), weight[0].numel())  # patches side by side are a product
        if math.prod(rows) == input.numel():
            flat = weight.flatten(1)
            return Call("linear", (rows,), flops, input.new_empty(0), lambda x: F.linear(x, flat))
    return Call(
        "convolution",
        (tuple(input.shape),),
        flops,
        input.new_empty(0),
        lambda x: func(x, weight, None, *rest, **options),
    )


class Bound:
    """Repeats lists of calls. Inputs of one shape are one tensor, however many calls take it."""

    def __init__(self) -> None:
        self._inputs: dict[Any, Tensor] = {}

    def prepare(self, calls: Sequence[Call]) -> Callable[[], None]:
        """What runs ``calls``, in order."""
        prepared = [(call.run, [self._input(call, place) for place in range(len(call.inputs))]) for call in calls]

        def run() -> None:
            with torch.inference_mode():
                for function, inputs in prepared:
                    function(*inputs)

        return run

    def _input(self, call: Call, place: int) -> Tensor:
        shape, like = call.inputs[place], call.like
        key = place, shape, like.dtype, like.device
        if key not in self._inputs:
            made = torch.randn(shape, generator=torch.Generator().manual_seed(len(self._inputs)))
            self._inputs[key] = made.to(like.device, like.dtype)
        return self._inputs[key]


def work(calls: Sequence[Call]) -> int:
    """Floating-point operations of ``calls``, 2 per multiply-add."""
    return sum(call.flops for call in calls)
