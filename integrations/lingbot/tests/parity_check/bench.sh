#!/usr/bin/env bash
# Seconds of a clip, original and ours, on one stack: the same environment (PyTorch, CUDA), GPU, weights in bfloat16, picture,
# path, 480x832, frames, steps and guidance by two passes. Nothing else should run on the GPU.
#
#   REPO=lingbot-world CHECKPOINTS=lingbot-world-base-cam IMAGE=street.png CAMERA=path bash bench.sh
#
# The original takes flash-attn where it is installed and ours PyTorch's SDPA; the first lines say what is there.
set -euo pipefail

: "${REPO:?set REPO to a clone of the original at 6ca87d4c}"
: "${CHECKPOINTS:?set CHECKPOINTS to a folder with the files of lingbot-world-base-cam}"
: "${IMAGE:?set IMAGE to the first frame}"
: "${CAMERA:?set CAMERA to a folder with poses.npy and intrinsics.npy}"
frames="${FRAMES:-81}" steps="${STEPS:-70}" out="${OUT:-bench}"
prompt="A first-person walk through an old town in the morning sun"
checkpoints=$(realpath "$CHECKPOINTS") image=$(realpath "$IMAGE") camera=$(realpath "$CAMERA")
mkdir -p "$out"
out=$(realpath "$out")

python - <<'PYTHON'
import importlib.util
import torch
print(torch.__version__, torch.version.cuda, torch.cuda.get_device_name())
print("flash-attn:", "installed" if importlib.util.find_spec("flash_attn") else "not installed")
PYTHON
git -C "$REPO" rev-parse HEAD

(cd "$REPO" && python generate.py --task i2v-A14B --size "480*832" --ckpt_dir "$checkpoints" --image "$image" \
    --action_path "$camera" --prompt "$prompt" --frame_num "$frames" --sample_steps "$steps" --base_seed 0 \
    --save_file "$out/original.mp4") 2>&1 | tee "$out/original.log"

flashdreams-run lingbot-world-cam --prompt "$prompt" --image "$image" --control "$camera" --num-frames "$frames" \
    --num-steps "$steps" --seed 0 --device cuda --output "$out/ours.mp4" 2>&1 | tee "$out/ours.log"
python -c 'import json, sys; print("ours, seconds:", json.load(open(sys.argv[1]))["timings"])' "$out/ours.json"
