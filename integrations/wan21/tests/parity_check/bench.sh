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
slug="${SLUG:-wan21-t2v-1.3b}" task="${TASK:-t2v-1.3B}" size="${SIZE:-832*480}"
frames="${FRAMES:-81}" steps="${STEPS:-50}" out="${OUT:-bench}"
prompt="A ginger cat walks along a garden wall at sunset"
checkpoints=$(realpath "$CHECKPOINTS")
mkdir -p "$out"
out=$(realpath "$out")

python - <<'PYTHON'
import importlib.util
import torch
print(torch.__version__, torch.version.cuda, torch.cuda.get_device_name())
print("flash-attn:", "installed" if importlib.util.find_spec("flash_attn") else "not installed")
PYTHON
git -C "$REPO" rev-parse HEAD

(cd "$REPO" && python generate.py --task "$task" --size "$size" --ckpt_dir "$checkpoints" --prompt "$prompt" \
    --frame_num "$frames" --sample_steps "$steps" --base_seed 0 --offload_model False \
    --save_file "$out/original.mp4") 2>&1 | tee "$out/original.log"

flashdreams-run "$slug" --prompt "$prompt" --num-frames "$frames" --num-steps "$steps" --seed 0 --device cuda \
    --width "${size%\**}" --height "${size#*\*}" --output "$out/ours.mp4" 2>&1 | tee "$out/ours.log"

python - "$out" "$steps" <<'PYTHON'
import json
import re
import sys
from pathlib import Path

out, steps = Path(sys.argv[1]), int(sys.argv[2])
bars = re.findall(rf"{steps}/{steps} \[[^\]]*\]", (out / "original.log").read_text())
print("original, denoising:", bars[-1] if bars else "no progress bar in original.log")
print("ours, seconds:", json.loads((out / "ours.json").read_text())["timings"])
PYTHON
