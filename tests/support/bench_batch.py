"""Seconds and peak memory of one prompt in batches on a GPU: what a batch gains over one video after the other.

python tests/support/bench_batch.py SLUG CHUNKS BATCH [BATCH ...]

Of a streaming model, the second half of CHUNKS chunks is measured, when the window is full; of one that makes a whole
clip as one chunk, the second of two clips of its own length (CHUNKS is then left aside).
"""

from __future__ import annotations

import sys

import torch

from flashdreams.infra.load import load_pipeline
from flashdreams.infra.rollout import Chunk
from flashdreams.plugins.registry import get_runner


def steady(chunks: list[Chunk]) -> dict[str, float]:
    """Mean seconds by phase of the second half, in which everything is warm; the last chunk is not committed."""
    last = chunks[len(chunks) // 2 :]
    phases = {phase for chunk in last for phase in chunk.timings}
    times = {phase: [chunk.timings[phase] for chunk in last if phase in chunk.timings] for phase in sorted(phases)}
    return {phase: sum(values) / len(values) for phase, values in times.items()}


def main(slug: str, chunks: int, batches: list[int], device: str = "cuda") -> None:
    """Print a line per batch."""
    runner, pipeline = get_runner(slug), load_pipeline(slug, device=device)
    whole = pipeline.config.diffusion_model.transformer.bidirectional
    conditions = pipeline.encode_prompts([runner.prompt])
    grey = torch.full((pipeline.config.height, pipeline.config.width, 3), 128, dtype=torch.uint8)
    given = {"image": grey} if pipeline.config.image_use == "concat" else {}
    for batch in batches:
        slots = {name: value.repeat(batch, 1, 1) for name, value in conditions.to_dict().items()}
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        if whole:
            made = [next(pipeline.rollout(conditions=slots, seed=0, **given)) for _ in range(2)]
        else:
            made = list(pipeline.rollout(conditions=slots, num_chunk=chunks, seed=0, **given))
        mean, frames = steady(made), batch * made[-1].frames.shape[1]
        memory = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
        rate = frames / sum(mean.values())
        print(f"batch {batch}: {mean}, {rate:.1f} frames a second in all, peak {memory:.1f} GiB")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), [int(batch) for batch in sys.argv[3:]])
