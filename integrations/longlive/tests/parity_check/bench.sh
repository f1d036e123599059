#!/usr/bin/env bash
# Seconds per chunk, original and ours, on one stack: the same environment (PyTorch, CUDA), GPU, weights, 480x832,
# 120 latent frames (the original's length stands in its settings). Nothing else should run on the GPU.
#
#   REPO=LongLive bash bench.sh
#
# The original prints its profile (initialisation, diffusion by block, VAE) when asked to; ours writes the run record.
set -euo pipefail

: "${REPO:?set REPO to a clone of the original at 9266de9c}"
out="${OUT:-bench}"
prompt="A ginger cat walks along a garden wall at sunset"
mkdir -p "$out"
out=$(realpath "$out")

python - <<'PYTHON'
import importlib.util
import torch
print(torch.__version__, torch.version.cuda, torch.cuda.get_device_name())
print("flash-attn:", "installed" if importlib.util.find_spec("flash_attn") else "not installed")
PYTHON
git -C "$REPO" rev-parse HEAD

# Its own script, with the settings that name base and LoRA; it prints its profile of blocks.
(cd "$REPO" && python inference.py --config_path configs/longlive_inference.yaml) 2>&1 | tee "$out/original.log"

slug="${SLUG:-longlive-t2v-1.3b}"
flashdreams-run "$slug" --prompt "$prompt" --num-chunk "${CHUNKS:-40}" --seed 0 --device cuda \
    --output "$out/$slug.mp4" 2>&1 | tee "$out/$slug.log"
python -c 'import json, sys; print(sys.argv[1], json.load(open(sys.argv[1]))["timings"])' "$out/$slug.json"
