"""What a server adds to the bare pipeline: ``python tests/support/bench_serving.py [SLUG] [--chunks N]``.

Prints milliseconds and percent per chunk: a session against a rollout, and what a chunk takes beyond the worker's own
computing (which other work on the machine disturbs less); then what several sessions get each.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from typing import Any

import torch

from flashdreams import load_pipeline
from flashdreams.client import Session
from flashdreams.plugins.registry import get_runner
from flashdreams.serving.config import ServeConfig
from flashdreams.serving.server import make_service
from serving import PROMPT, Running, running


def bare(slug: str, prompt: str, chunks: int) -> list[float]:
    """Seconds of each chunk without a server, its commit included."""
    pipeline = load_pipeline(slug, device="cpu")
    seconds = []
    with pipeline.rollout(prompt, seed=0, num_chunk=chunks) as rollout:
        for _ in range(chunks):
            begun = time.perf_counter()
            next(rollout)
            rollout.flush()
            seconds.append(time.perf_counter() - begun)
    return seconds


def served(server: Running, prompt: str, chunks: int, encoding: str) -> list[float]:
    """Seconds between the chunks that a client receives."""
    gaps = []
    with Session(server.url, prompt, seed=0, num_chunk=chunks, delivery="all", encoding=encoding) as session:
        last: float | None = None
        for _ in session:
            now = time.perf_counter()
            if last is not None:
                gaps.append(now - last)
            last = now
    return gaps


def together(server: Running, prompt: str, sessions: int, chunks: int) -> None:
    """Chunks a second of several sessions at once, and how fairly they share."""
    rates: list[float] = []

    def one(seed: int) -> None:
        with Session(server.url, prompt, seed=seed, delivery="all", num_chunk=chunks) as session:
            begun, frames = time.perf_counter(), sum(len(chunk.frames) for chunk in session)
            rates.append(frames / (time.perf_counter() - begun))

    threads = [threading.Thread(target=one, args=(seed,)) for seed in range(sessions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"{sessions} sessions: {sum(rates):.2f} FPS together, fairness (min/max) {min(rates) / max(rates):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("slug", nargs="?", default="tiny-world")
    parser.add_argument("--chunks", type=int, default=24)
    parser.add_argument("--sessions", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options: Any = parser.parse_args()
    torch.set_num_threads(options.threads)
    prompt, runner = PROMPT, get_runner(options.slug)
    alone = statistics.median(bare(options.slug, prompt, options.chunks)[1:])
    print(f"bare pipeline: {1000 * alone:.1f} ms a chunk, {options.threads} threads")
    config = ServeConfig(port=0, threads=options.threads)
    service = make_service(config, runner)
    with running(config, service) as server:
        for encoding in ("raw", "jpeg"):
            before = service.metrics.overhead_seconds
            gaps = served(server, prompt, options.chunks, encoding)
            asked = (service.metrics.overhead_seconds - before) / options.chunks
            gap = statistics.median(gaps)
            print(
                f"{encoding}: {1000 * gap:.1f} ms between chunks at the client ({100 * (gap / alone - 1):+.1f} %); "
                f"beyond the worker's computing {1000 * asked:.2f} ms a chunk ({100 * asked / alone:.2f} %)"
            )
        for count in options.sessions:
            together(server, prompt, count, options.chunks)


if __name__ == "__main__":
    main()
