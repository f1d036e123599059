#!/usr/bin/env bash
# What a batch gains: seconds and peak memory of ours for several players of one picture (tests/support/bench_batch.py
# does so for models that take a prompt).
#
#   BATCHES="1 2 4" SLUG=matrix-game-2-universal bash bench_batch.sh
set -euo pipefail

export PYTHONPATH="$(realpath "$(dirname "${BASH_SOURCE[0]}")/../../../../tests/support")"
python - "${SLUG:-matrix-game-2-universal}" "${CHUNKS:-10}" ${BATCHES:-1 2 4} <<'PYTHON'
import sys
import torch
from bench_batch import steady
from flashdreams import load_pipeline
slug, chunks, *batches = sys.argv[1:]
pipeline = load_pipeline(slug, device="cuda")
image = torch.randint(0, 256, (pipeline.config.height, pipeline.config.width, 3), dtype=torch.uint8)
for batch in map(int, batches):
    torch.cuda.reset_peak_memory_stats()
    made = list(pipeline.rollout([""] * batch, image=image.expand(batch, -1, -1, -1), num_chunk=int(chunks), seed=0))
    mean, frames = steady(made), batch * made[-1].frames.shape[1]
    print(f"batch {batch}: {mean}, {frames / sum(mean.values()):.1f} frames a second in all, "
          f"peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
PYTHON
