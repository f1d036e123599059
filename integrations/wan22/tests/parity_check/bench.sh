#!/usr/bin/env bash
# Time per denoising step, original and ours, on one stack: the same environment (PyTorch, CUDA), GPU, weights in
# bfloat16, prompt, size, frames, steps and guidance by two passes. Nothing else should run on the GPU.
#
#   REPO=Wan2.2 CHECKPOINTS=Wan2.2-TI2V-5B bash bench.sh
#
# The original takes flash-attn where it is installed and ours PyTorch's SDPA; the first lines say what is there.
set -euo pipefail

: "${REPO:?set REPO to a clone of the original at 42bf4cfa}"
: "${CHECKPOINTS:?set CHECKPOINTS to a folder with the files of the native repository}"
repo=$REPO checkpoints=$CHECKPOINTS
slug="${SLUG:-wan22-ti2v-5b}" task="${TASK:-ti2v-5B}" size="${SIZE:-1280*704}"
frames="${FRAMES:-121}" steps="${STEPS:-50}" out="${OUT:-bench}"
source "$(dirname "${BASH_SOURCE[0]}")/../../../../tests/support/bench_wan.sh"
