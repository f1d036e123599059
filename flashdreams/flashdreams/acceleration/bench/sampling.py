"""Times of several cases in turn, so that what disturbs the machine disturbs all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Clock = Callable[[], float]


@dataclass(frozen=True)
class Plan:
    """How often something is measured: ``warmup`` rounds that do not count, then ``repeat`` that do."""

    repeat: int = 5
    warmup: int = 1
    clock: Clock = time.perf_counter

    def __post_init__(self) -> None:
        if self.repeat < 1 or self.warmup < 0:
            raise ValueError(f"repeat={self.repeat}, warmup={self.warmup}; expected at least 1, and 0 or more")


def interleave(
    cases: Mapping[str, Callable[[], Any]], plan: Plan, synchronize: Callable[[], None] = lambda: None
) -> dict[str, tuple[float, ...]]:
    """Seconds of each case, one per round; in every round all cases run once, in order.

    Args:
        synchronize: waits for the device, before each reading of the clock.
    """
    times: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(plan.warmup + plan.repeat):
        for name, case in cases.items():
            synchronize()
            begun = plan.clock()
            case()
            synchronize()
            spent = plan.clock() - begun
            if number >= plan.warmup:
                times[name].append(spent)
    return {name: tuple(values) for name, values in times.items()}


def waiter(device: torch.device) -> Callable[[], None]:
    """What waits until ``device`` has done all that it was told."""
    return (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else (lambda: None)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` of ``values`` lie, on a line between the two nearest."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def median(values: Sequence[float]) -> float:
    return percentile(values, 0.5)
