"""Muon (Jordan et al., 2024) in float32 for stacks of equally shaped matrices; convolutions are flattened.

``torch.optim.Muon`` orthogonalises in bfloat16, which CPUs without bf16 units do ten times slower.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from tiny_world.train import parallel

_A, _B, _C = 3.4445, -4.7750, 2.0315


def orthogonalised(update: Tensor, steps: int = 4) -> Tensor:
    """Newton-Schulz: ``[N, m, n]`` -> matrices of the same singular vectors and singular values near 1."""
    tall = update.shape[-2] > update.shape[-1]
    x = update.mT if tall else update
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    return x.mT if tall else x


def _shared(stacked: Tensor) -> Tensor:
    """:func:`orthogonalised`, each worker doing its share of the matrices."""
    workers, rank = parallel.workers(), parallel.rank()
    if workers == 1:
        return orthogonalised(stacked)
    result = torch.zeros_like(stacked)
    if len(stacked[rank::workers]):
        result[rank::workers] = orthogonalised(stacked[rank::workers])
    dist.all_reduce(result)
    return result


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised; scaled by ``0.2 sqrt(max(m, n))`` to the step size of AdamW."""

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for param in group["params"]:
                if param.grad is not None:
                    by_shape[param.shape].append(param)
            for shape, params in by_shape.items():
                grads = [p.grad for p in params if p.grad is not None]
                buffers = [self.state[p].setdefault("momentum", torch.zeros_like(p)) for p in params]
                torch._foreach_lerp_(buffers, grads, 1 - group["momentum"])
                stacked = torch.stack(torch._foreach_lerp(grads, buffers, group["momentum"])).flatten(2)
                updates = [update.view(shape) for update in _shared(stacked).unbind()]
                torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(params, updates, alpha=-group["lr"] * 0.2 * max(stacked.shape[1:]) ** 0.5)
