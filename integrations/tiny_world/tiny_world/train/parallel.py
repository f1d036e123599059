"""Data parallelism over processes: on a shared CPU, two one-thread workers beat one worker of two threads."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def run(workers: int, function: Callable[..., None], *args: Any) -> None:
    """Call ``function(*args)`` here, or in ``workers`` one-thread processes that share their gradients."""
    if workers == 1:
        function(*args)
        return
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_enter, (workers, str(Path(folder) / "store"), function, args), nprocs=workers)


def _enter(rank: int, workers: int, store: str, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=workers)
    function(*args)
    dist.barrier()
    dist.destroy_process_group()


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def workers() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def agree(value: float) -> float:
    """The first worker's ``value``, in every worker."""
    if workers() == 1:
        return value
    shared = torch.tensor([value], dtype=torch.float64)
    dist.broadcast(shared, 0)
    return float(shared)


def average_gradients(module: nn.Module) -> None:
    """Mean of every gradient over the workers; parameters without one take part as zeros."""
    if workers() == 1:
        return
    params = [p for p in module.parameters() if p.requires_grad]
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in params])
    dist.all_reduce(flat)
    flat /= workers()
    for param, grad in zip(params, flat.split([p.numel() for p in params]), strict=True):
        param.grad = grad.view_as(param)
