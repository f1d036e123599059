#!/usr/bin/env bash
# Seconds for one video, original and ours, on one stack: the same environment (PyTorch, CUDA, block-sparse-attn), GPU,
# weights and video. Nothing else should run on the GPU.
#
#   REPO=FlashVSR WEIGHTS=FlashVSR/examples/WanVSR/FlashVSR VIDEO=clip.mp4 bash bench.sh
#
# The original's step includes loading; its pipeline prints a progress bar of its calls, whose rate is what to compare.
# Ours writes the run record.
set -euo pipefail

: "${REPO:?set REPO to a clone of the original at ccac0ac4}"
: "${WEIGHTS:?set WEIGHTS to the folder of its weights and posi_prompt.pth}"
: "${VIDEO:?set VIDEO to a small video}"
out="${OUT:-bench}"
frames="${FRAMES:-125}"
slug="${SLUG:-flashvsr-v1.0-x4}"
here=$(dirname "$(realpath "${BASH_SOURCE[0]}")")
mkdir -p "$out"

python - <<'PYTHON'
import importlib.util
import torch
print(torch.__version__, torch.version.cuda, torch.cuda.get_device_name())
print("block-sparse-attn:", "installed" if importlib.util.find_spec("block_sparse_attn") else "not installed")
PYTHON
git -C "$REPO" rev-parse HEAD

time python "$here/run.py" original --repo "$REPO" --video "$VIDEO" --frames "$frames" --out "$out/ref.safetensors" \
    2>&1 | tee "$out/original.log"

flashdreams-run "$slug" --video "$VIDEO" --seed 0 --device cuda --output "$out/$slug.mp4" \
    --pipeline.encoder.checkpoint-path "$WEIGHTS/LQ_proj_in.ckpt" \
    --pipeline.text-encoder.checkpoint-path "$WEIGHTS/posi_prompt.pth" \
    --pipeline.decoder.checkpoint-path "$WEIGHTS/TCDecoder.ckpt" \
    --ckpt-path "$WEIGHTS/diffusion_pytorch_model_streaming_dmd.safetensors" 2>&1 | tee "$out/$slug.log"
python -c 'import json, sys; print(sys.argv[1], json.load(open(sys.argv[1]))["timings"])' "$out/$slug.json"
