"""What every training stage shares: wall-clock schedules, weight averages, checkpoints, logs."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn


@dataclass
class Clock:
    """Progress of a stage in wall-clock time, so that a busy machine shortens a stage, never its decay."""

    minutes: float
    spent: float = 0.0
    _started: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return self.spent + time.monotonic() - self._started

    @property
    def progress(self) -> float:
        """0 at the start, 1 when the stage is over."""
        return min(self.seconds / (60 * self.minutes), 1.0)


def rate(progress: float, step: int, flat: float, warmup: int = 30, end: float = 0.02) -> float:
    """Learning-rate factor: warm-up in steps, flat until ``flat`` of the time, then linear to ``end``."""
    decay = 1.0 if progress < flat else 1.0 - (1.0 - end) * (progress - flat) / (1.0 - flat)
    return min(1.0, (step + 1) / warmup) * decay


class Average:
    """Exponential moving average of parameters; ``decay`` grows with the step so that the start is forgotten."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        self.values = {k: v.detach().clone() for k, v in module.named_parameters()}

    @torch.no_grad()
    def update(self, module: nn.Module, step: int) -> None:
        decay = min(self.decay, (step + 1) / (step + 10))
        names, params = zip(*module.named_parameters(), strict=True)
        torch._foreach_lerp_([self.values[n] for n in names], list(params), 1.0 - decay)

    def copy_to(self, module: nn.Module) -> None:
        with torch.no_grad():
            for name, param in module.named_parameters():
                param.copy_(self.values[name])


def set_rate(optimizers: list[torch.optim.Optimizer], factor: float) -> None:
    """Scale every group's ``base_lr`` by ``factor``."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("base_lr", group["lr"]) * factor


def save(path: Path, **state: Any) -> None:
    """Write a checkpoint so that an interrupted write never replaces a good one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, path)


def load(path: Path) -> dict[str, Any] | None:
    return torch.load(path, map_location="cpu", weights_only=True) if path.exists() else None


class Log:
    """One JSON object a line in ``path``, echoed to the terminal."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a")

    def __call__(self, **values: Any) -> None:
        line = json.dumps({k: round(v, 5) if isinstance(v, float) else v for k, v in values.items()})
        self._file.write(line + "\n")
        self._file.flush()
        print(line, flush=True)
