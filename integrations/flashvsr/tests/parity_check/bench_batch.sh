#!/usr/bin/env bash
# What a batch gains: seconds per chunk and peak memory of ours for several videos of one size at once. Speed does not
# depend on what the frames show, so they are random.
#
#   BATCHES="1 2 4" SLUG=flashvsr-x4 HEIGHT=192 WIDTH=320 bash bench_batch.sh
set -euo pipefail

python - "${SLUG:-flashvsr-x4}" "${CHUNKS:-10}" "${HEIGHT:-192}" "${WIDTH:-320}" ${BATCHES:-1 2 4} <<'PYTHON'
import sys

import torch

from flashdreams import load_pipeline
from flashdreams.core.controls import Control, Frame

slug, (chunks, height, width, *batches) = sys.argv[1], map(int, sys.argv[2:])
pipeline = load_pipeline(slug, device="cuda")
frame = Control(frame=Frame(torch.randint(0, 256, (height, width, 3), dtype=torch.uint8).numpy()))
for batch in batches:
    torch.cuda.reset_peak_memory_stats()
    made = list(pipeline.rollout(
        [""] * batch, control=lambda start, stop: [[frame] * (stop - start)] * batch, num_chunk=chunks,
        height=4 * height, width=4 * width,
    ))
    last = made[len(made) // 2 :]  # everything is warm, the window is full
    seconds = sum(sum(chunk.timings.values()) for chunk in last) / len(last)
    rate, memory = batch * last[0].frames.shape[1] / seconds, torch.cuda.max_memory_allocated() / 2**30
    print(f"batch {batch}: {seconds:.3f} s per chunk, {rate:.1f} frames a second in all, peak {memory:.1f} GiB")
PYTHON
