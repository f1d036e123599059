#!/usr/bin/env bash
# Seconds per chunk, original and ours, on one stack: the same environment (PyTorch, CUDA), GPU, weights, picture, 352x640.
# Nothing else should run on the GPU.
#
#   REPO=Matrix-Game/Matrix-Game-2 MODELS=Matrix-Game-2.0 IMAGE=street.png bash bench.sh
#
# The original's script is timed as a whole, for two lengths, so that loading falls out of the difference; ours writes the
# run record.
set -euo pipefail

: "${REPO:?set REPO to Matrix-Game-2 in a clone of the original}"
: "${MODELS:?set MODELS to a folder with the files of Skywork/Matrix-Game-2.0}"
: "${IMAGE:?set IMAGE to a picture}"
out="${OUT:-bench}"
models=$(realpath "$MODELS") image=$(realpath "$IMAGE")
mkdir -p "$out"
out=$(realpath "$out")

python - <<'PYTHON'
import importlib.util
import torch
print(torch.__version__, torch.version.cuda, torch.cuda.get_device_name())
print("flash-attn:", "installed" if importlib.util.find_spec("flash_attn") else "not installed")
PYTHON
git -C "$REPO" rev-parse HEAD

for frames in 30 90; do
    begun=$(date +%s)
    (cd "$REPO" && python inference.py --config_path configs/inference_yaml/inference_universal.yaml \
        --checkpoint_path "$models/base_distilled_model/base_distill.safetensors" --img_path "$image" \
        --output_folder "$out/original-$frames" --num_output_frames "$frames" --seed 0 --pretrained_model_path "$models") \
        2>&1 | tee "$out/original-$frames.log"
    echo "original, $frames latent frames: $(($(date +%s) - begun)) seconds with loading"
done

for slug in matrix-game-2-universal matrix-game-2-gta-drive matrix-game-2-templerun; do
    flashdreams-run "$slug" --image "$image" --control "w:360" --num-chunk 30 --seed 0 --device cuda \
        --output "$out/$slug.mp4" 2>&1 | tee "$out/$slug.log"
    python -c 'import json, sys; print(sys.argv[1], json.load(open(sys.argv[1]))["timings"])' "$out/$slug.json"
done
