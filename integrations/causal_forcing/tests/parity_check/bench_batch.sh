#!/usr/bin/env bash
# Seconds per chunk and peak memory of ours for batches of one prompt: what a batch gains over one video after the other.
#
#   BATCHES="1 2 4" CHUNKS=8 SLUG=causal-forcing-t2v-1.3b bash bench_batch.sh
set -euo pipefail

python - "${SLUG:-causal-forcing-t2v-1.3b}" "${CHUNKS:-8}" ${BATCHES:-1 2 4} <<'PYTHON'
import sys

import torch

from flashdreams.infra.load import load_pipeline
from flashdreams.plugins.registry import get_runner

slug, chunks, *batches = sys.argv[1], *map(int, sys.argv[2:])
runner, pipeline = get_runner(slug), load_pipeline(slug, device="cuda")
conditions = pipeline.encode_prompts([runner.prompt])
for batch in batches:
    slots = {name: value.repeat(batch, 1, 1) for name, value in conditions.to_dict().items()}
    torch.cuda.reset_peak_memory_stats()
    made = list(pipeline.rollout(conditions=slots, num_chunk=chunks, seed=0))
    last = made[len(made) // 2 :]  # the window is full and everything is warm
    mean = {phase: sum(chunk.timings[phase] for chunk in last) / len(last) for phase in last[0].timings}
    frames, seconds = batch * last[-1].frames.shape[1], sum(mean.values())
    memory = torch.cuda.max_memory_allocated() / 2**30
    print(f"batch {batch}: {mean}, {frames / seconds:.1f} frames a second in all, peak {memory:.1f} GiB")
PYTHON
