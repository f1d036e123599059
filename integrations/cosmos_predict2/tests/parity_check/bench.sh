#!/usr/bin/env bash
# Seconds of a clip, the pipeline of diffusers and ours, on one stack: the same environment (PyTorch, CUDA), GPU, weights
# in bfloat16, prompt, size, frames, steps and guidance by two passes. Nothing else should run on the GPU.
#
#   CHECKPOINTS=Cosmos-Predict2.5-2B bash bench.sh
#
# Each side makes the clip twice, and the second time counts. Ours also prints its seconds by phase (dit, decode).
set -euo pipefail

: "${CHECKPOINTS:?set CHECKPOINTS to a folder with the repository in the layout of diffusers}"
here=$(dirname "${BASH_SOURCE[0]}")
slug="${SLUG:-cosmos-predict2.5-2b}" frames="${FRAMES:-93}" steps="${STEPS:-35}" out="${OUT:-bench}"
height="${HEIGHT:-704}" width="${WIDTH:-1280}"
mkdir -p "$out"

python - <<'PYTHON'
import diffusers
import torch
print(torch.__version__, torch.version.cuda, torch.cuda.get_device_name(), "diffusers", diffusers.__version__)
PYTHON

python "$here/run.py" original --checkpoints "$CHECKPOINTS" --slug "$slug" --frames "$frames" --steps "$steps" \
    --height "$height" --width "$width" --repeat 2 --out "$out/reference.safetensors" 2>&1 | tee "$out/original.log"
python "$here/run.py" ours --checkpoints "$CHECKPOINTS" --reference "$out/reference.safetensors" --repeat 2 \
    2>&1 | tee "$out/ours.log"
