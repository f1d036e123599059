"""Comparison with other implementations in float64, theirs without the roundings to float32 that are written into it.

Public libraries keep some of their arithmetic in float32 whatever the dtype of the model: norms, rotary tables, the
sinusoids of the timestep, softmax, upsampling. That is a choice of precision, not of maths, and hides any difference
below about 1e-6. In :class:`Float64` such code computes the same formulas in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

LIMIT = 1e-8

FIGURES: dict[str, float] = {}
"""Largest difference found so far, by what was compared; ``tests/parity`` prints them at the end of a run."""


class Float64(TorchFunctionMode):
    """Within it, whatever asks PyTorch for float32, by name or by default, gets float64.

    Modules built in it have float64 weights and tables.
    """

    def __enter__(self) -> Float64:
        self.before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        torch.set_default_dtype(self.before)

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        function = Tensor.double if func is Tensor.float else func
        named = {name: _wide(value) for name, value in (kwargs or {}).items()}
        return function(*map(_wide, args), **named)


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def randomize(module: nn.Module, seed: int = 0) -> None:
    """Random weights of sizes at which every part of ``module`` counts, norms, biases and embeddings among them."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            gain = "norm" in name and name.endswith("weight") or name.endswith("gamma")
            spread = 1 / math.sqrt(math.prod(weight.shape[1:])) if weight.ndim > 1 and not gain else 0.2
            weight.copy_(torch.randn(weight.shape, generator=generator, dtype=torch.float64) * spread + gain)


def randn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def difference(what: str, got: Tensor, want: Tensor) -> float:
    """Largest absolute difference, noted in :data:`FIGURES` under ``what``."""
    assert got.dtype == want.dtype == torch.float64, f"{what}: {got.dtype} and {want.dtype}"
    assert got.shape == want.shape, f"{what}: {list(got.shape)} and {list(want.shape)}"
    assert want.isfinite().all(), f"{what}: the other implementation gives no number"
    assert want.numel() == 1 or want.std() > 1e-3, f"{what}: there is nothing to compare in a constant"
    found = (got - want).abs().max().item()
    FIGURES[what] = max(FIGURES.get(what, 0.0), found)
    return found


def assert_same(what: str, got: Tensor, want: Tensor, limit: float = LIMIT) -> None:
    found = difference(what, got, want)
    assert found < limit, f"{what}: max |d| is {found:.1e}; expected less than {limit:.0e}"


def assert_same_gradients(
    what: str,
    got: Tensor,
    want: Tensor,
    ours: nn.Module,
    theirs: nn.Module,
    rename: Callable[[dict[str, Tensor]], Mapping[str, Tensor]],
    unused: tuple[str, ...] = (),
) -> None:
    """The outputs depend on every weight, and in the same way: their gradients agree, under the key map of the weights.

    A comparison of outputs alone would not notice a weight that both ignore; ``unused`` names those that may be.
    """
    direction = randn(*got.shape, seed=9) / math.sqrt(got.numel())
    for module, output in ((ours, got), (theirs, want)):
        module.zero_grad()
        (output * direction).sum().backward()
    gradients = [
        {
            name: torch.zeros_like(weight) if weight.grad is None else weight.grad
            for name, weight in m.named_parameters()
        }
        for m in (ours, theirs)
    ]
    found, wanted = gradients[0], rename(gradients[1])
    assert found.keys() == wanted.keys()
    idle = sorted(name for name, gradient in found.items() if not gradient.any())
    assert idle == sorted(unused), f"{what}: the output does not depend on {idle}"
    flat = [torch.cat([part[name].flatten() for name in found]) for part in (found, wanted)]
    assert_same(f"{what}, gradient of every weight", *flat)
