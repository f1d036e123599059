#!/usr/bin/env bash
# Time per denoising step, original and ours, on one stack: the same environment (PyTorch, CUDA), GPU, weights in
# bfloat16, prompt, size, frames, steps and guidance by two passes. Nothing else should run on the GPU.
#
#   REPO=Wan2.1 CHECKPOINTS=Wan2.1-T2V-1.3B bash bench.sh
#
# The original takes flash-attn where it is installed and ours PyTorch's SDPA; the first lines say what is there.
set -euo pipefail

: "${REPO:?set REPO to a clone of the original at 9737cba9}"
: "${CHECKPOINTS:?set CHECKPOINTS to a folder with the files of the native repository}"
repo=$REPO checkpoints=$CHECKPOINTS
slug="${SLUG:-wan21-t2v-1.3b}" task="${TASK:-t2v-1.3B}" size="${SIZE:-832*480}"
frames="${FRAMES:-81}" steps="${STEPS:-50}" out="${OUT:-bench}"
source "$(dirname "${BASH_SOURCE[0]}")/../../../../tests/support/bench_wan.sh"
