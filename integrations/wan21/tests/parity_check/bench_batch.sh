#!/usr/bin/env bash
# Seconds and peak memory of ours for batches of one prompt: what a batch gains over one video after the other.
#
#   BATCHES="1 2 4" bash bench_batch.sh
set -euo pipefail

python - "${SLUG:-wan21-t2v-1.3b}" "${STEPS:-8}" "${FRAMES:-81}" ${BATCHES:-1 2 4} <<'PYTHON'
import sys
import time

import torch

from flashdreams.config import derive_config
from flashdreams.infra.load import load_pipeline
from flashdreams.plugins.registry import get_runner

slug, steps, frames, *batches = sys.argv[1], *map(int, sys.argv[2:])
runner = get_runner(slug)
pipeline = load_pipeline(
    derive_config(runner.pipeline, {"diffusion_model.scheduler.num_steps": steps}), device="cuda"
)
conditions = pipeline.encode_prompts([runner.prompt])
for batch in batches:
    slots = {name: value.repeat(batch, 1, 1) for name, value in conditions.to_dict().items()}
    for measured in (False, True):  # the first run warms up
        torch.cuda.reset_peak_memory_stats()
        begun = time.perf_counter()
        (chunk,) = pipeline.rollout(conditions=slots, num_frames=frames, seed=0)
        seconds = time.perf_counter() - begun
    memory = torch.cuda.max_memory_allocated() / 2**30
    print(f"batch {batch}: {seconds:.2f} s ({seconds / batch:.2f} a video), {chunk.timings}, peak {memory:.1f} GiB")
PYTHON
