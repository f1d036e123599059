"""Ten thousand chunks of a small model: neither time nor memory grows.

    PYTHONPATH=tests/support python tests/support/long_rollout.py --chunks 10000

A line through the times of all chunks, and one through the resident memory, with 95 % intervals of their slopes:
blocks of 100 chunks are drawn again and again (bootstrap), so that slow minutes of a shared machine count as what they
are. Printed is the slope times the number of chunks, in per cent of the median.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from flashdreams import load_pipeline
from flashdreams.config import derive_config
from mini_wan import RUNNER

BLOCK = 100
WINDOW = 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=10_000)
    chunks = parser.parse_args().chunks
    torch.manual_seed(0)
    transformer = {"window_size_t": WINDOW, "sink_size_t": 1, "len_t": 1}
    pipeline = load_pipeline(derive_config(RUNNER.pipeline, diffusion_model={"transformer": transformer}))
    text = torch.randn(1, 8, 16)
    seconds, resident = [], []
    rollout = pipeline.rollout("", conditions={"text": text}, height=64, width=64, seed=0)
    for _ in range(2 * WINDOW):  # the window fills
        next(rollout)
    for _ in range(chunks):
        begun = time.perf_counter()
        next(rollout)
        seconds.append(time.perf_counter() - begun)
        resident.append(_resident())
    for name, values, unit in (("time", seconds, 1e3), ("memory", resident, 2.0**-20)):
        _report(name, torch.tensor(values, dtype=torch.float64) * unit)


def _report(name: str, values: torch.Tensor) -> None:
    blocks = values[: len(values) // BLOCK * BLOCK].unflatten(0, (-1, BLOCK)).median(1).values
    place = torch.arange(len(blocks), dtype=torch.float64) * BLOCK
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(blocks), (2000, len(blocks)), generator=generator)
    slopes = _slope(place[drawn], blocks[drawn]).sort().values
    median, scale = values.median(), len(values) * 100
    slope, low, high = (float(s * scale / median) for s in (_slope(place, blocks), slopes[50], slopes[1949]))
    unit = "ms" if name == "time" else "MiB"
    growth = f"{slope:+.2f} % of it (95 %: {low:+.2f} to {high:+.2f})"
    print(f"{name}: median {median:.3f} {unit}; over {len(values)} chunks {growth}")


def _slope(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Least squares, per row."""
    x, y = x - x.mean(-1, keepdim=True), y - y.mean(-1, keepdim=True)
    return (x * y).sum(-1) / (x * x).sum(-1)


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return 4096 * pages


if __name__ == "__main__":
    main()
