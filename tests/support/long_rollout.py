"""Ten thousand chunks of a small model: neither time nor memory grows.

    PYTHONPATH=tests/support python tests/support/long_rollout.py --chunks 10000

A line through the times of all chunks, and one through the resident memory, with 95 % intervals of their slopes:
blocks of 100 chunks are drawn again and again (bootstrap), so that slow minutes of a shared machine count as what they
are. Printed is the slope times the number of chunks, in per cent of the median. Every fourth chunk is followed by one
of a rollout that is begun anew for each block: the line through the ratio of the two does not know the machine's mood.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from flashdreams import load_pipeline
from flashdreams.config import derive_config
from flashdreams.infra.rollout import Rollout
from mini_wan import RUNNER

BLOCK, EVERY = 100, 4
WINDOW = 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=10_000, help=f"a multiple of {BLOCK}")
    chunks = parser.parse_args().chunks
    torch.manual_seed(0)
    transformer = {"window_size_t": WINDOW, "sink_size_t": 1, "len_t": 1}
    pipeline = load_pipeline(derive_config(RUNNER.pipeline, diffusion_model={"transformer": transformer}))
    text = torch.randn(1, 8, 16)
    seconds, young_seconds, resident = [], [], []

    def start() -> Rollout:
        rollout = pipeline.rollout("", conditions={"text": text}, height=64, width=64, seed=0)
        for _ in range(2 * WINDOW):  # the window fills
            next(rollout)
        return rollout

    old = young = start()
    for chunk in range(chunks):
        if chunk % BLOCK == 0:
            young = start()
        seconds.append(_timed(old))
        if chunk % EVERY == 0:
            young_seconds.append(_timed(young))
        resident.append(_resident())
    times, ages = torch.tensor(seconds, dtype=torch.float64), torch.tensor(young_seconds, dtype=torch.float64)
    _report("time, ms", 1e3 * times)
    _report("time over that of a young rollout", times.view(-1, EVERY).median(1).values / ages, BLOCK // EVERY)
    _report("memory, MiB", torch.tensor(resident, dtype=torch.float64) / 2**20)


def _timed(rollout: Rollout) -> float:
    begun = time.perf_counter()
    next(rollout)
    return time.perf_counter() - begun


def _report(name: str, values: torch.Tensor, block: int = BLOCK) -> None:
    blocks = values.unflatten(0, (-1, block)).median(1).values
    place = torch.arange(len(blocks), dtype=torch.float64) / len(blocks)
    drawn = torch.randint(len(blocks), (2000, len(blocks)), generator=torch.Generator().manual_seed(0))
    slopes, median = _slope(place[drawn], blocks[drawn]).sort().values, values.median()
    slope, low, high = (float(100 * each / median) for each in (_slope(place, blocks), slopes[50], slopes[1949]))
    print(f"{name}: median {median:.3f}; over all chunks {slope:+.2f} % of it (95 %: {low:+.2f} to {high:+.2f})")


def _slope(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Least squares, per row."""
    x, y = x - x.mean(-1, keepdim=True), y - y.mean(-1, keepdim=True)
    return (x * y).sum(-1) / (x * x).sum(-1)


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return 4096 * pages


if __name__ == "__main__":
    main()
