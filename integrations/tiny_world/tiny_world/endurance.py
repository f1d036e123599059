"""Is a long rollout flat? ``python -m tiny_world.endurance``: time and memory per chunk, and what the frames show.

The slope is that of a least-squares line through the medians of blocks of 50 chunks, times the number of chunks, as a
share of the overall median. Processor time is given beside wall time, which other work on the machine disturbs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import numpy as np

from flashdreams import load_pipeline
from tiny_world._vision import read_frame
from tiny_world._words import ACTIONS, COLOURS, SHAPES

BLOCK = 50
WARM_UP = 50


def memory_mib() -> float:
    """Resident memory of this process (Linux)."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20


def keys(seed: int) -> Iterator[str]:
    """Endless random keys, each held for 1 to 4 chunks."""
    rng = np.random.default_rng(seed)
    while True:
        yield from [ACTIONS[rng.integers(1, len(ACTIONS))]] * int(rng.integers(1, 5))


def drift(values: list[float], chunks: int) -> float:
    """Slope of the block medians, times ``chunks``, over the median."""
    blocks = np.array(values[: len(values) // BLOCK * BLOCK]).reshape(-1, BLOCK)
    medians = np.median(blocks, axis=1)
    slope = np.polyfit((np.arange(len(medians)) + 0.5) * BLOCK, medians, 1)[0]
    return float(slope * chunks / np.median(values))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tiny_world.endurance", description=__doc__.splitlines()[0])
    parser.add_argument("--chunks", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    colour, shape = "red", "circle"
    rollout = load_pipeline("tiny-world", device="cpu").rollout(
        f"a {colour} {shape} on a gray background", seed=args.seed
    )
    pressed = keys(args.seed)
    wall, processor, memory, right = [], [], [], []
    for _ in range(args.chunks + WARM_UP):
        if rollout.frame:
            rollout.set_control(next(pressed))
        begun = time.perf_counter(), time.process_time()
        chunk = next(rollout)
        rollout.flush()
        if chunk.index < WARM_UP:
            continue
        wall.append(time.perf_counter() - begun[0])
        processor.append(time.process_time() - begun[1])
        memory.append(memory_mib())
        if chunk.index % 10 == 0:
            reading = read_frame(chunk.frames[-1].numpy())
            right.append((reading.colour == COLOURS.index(colour), reading.shape == SHAPES.index(shape)))
    for name, values, unit in (("wall time", wall, "s"), ("processor time", processor, "s"), ("memory", memory, "MiB")):
        print(f"{name}: median {np.median(values):.4g} {unit}, drift {100 * drift(values, args.chunks):+.2f} %")
    colours, shapes = np.mean(right, axis=0)
    last = np.mean(right[-20:], axis=0)
    print(f"colour right in {100 * colours:.1f} % of {len(right)} frames read, shape in {100 * shapes:.1f} %")
    print(f"in the last 20 of them: colour {100 * last[0]:.0f} %, shape {100 * last[1]:.0f} %")


if __name__ == "__main__":
    main()
