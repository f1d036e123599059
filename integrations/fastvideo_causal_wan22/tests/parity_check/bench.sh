#!/usr/bin/env bash
# Seconds per clip and per chunk, FastVideo and ours, on one stack: the same environment (PyTorch, CUDA), GPU, weights,
# prompt, picture, 480x832. Nothing else should run on the GPU.
#
#   MODEL=CausalWan2.2-I2V-A14B-Preview-Diffusers IMAGE=first.png bash bench.sh
set -euo pipefail

: "${MODEL:?set MODEL to the folder of the published model}"
: "${IMAGE:?set IMAGE to a picture of 832x480 pixels}"
slug=fastvideo-causal-wan22-i2v-a14b out="${OUT:-bench}"
prompt="The cat jumps off the wall"
mkdir -p "$out"

python - <<'PYTHON'
import importlib.util
import torch
print(torch.__version__, torch.version.cuda, torch.cuda.get_device_name())
print("flash-attn:", "installed" if importlib.util.find_spec("flash_attn") else "not installed")
PYTHON

python - "$MODEL" "$IMAGE" "$prompt" <<'PYTHON' 2>&1 | tee "$out/original.log"
import sys
import time
from fastvideo import VideoGenerator
model, image, prompt = sys.argv[1:]
if __name__ == "__main__":
    generator = VideoGenerator.from_pretrained(model, num_gpus=1)
    for _ in range(2):  # the first run warms up
        begun = time.perf_counter()
        generator.generate_video(prompt, image_path=image, num_frames=81, height=480, width=832, save_video=False)
        print(f"FastVideo: {time.perf_counter() - begun:.2f} s for the clip")
PYTHON

flashdreams-run "$slug" --prompt "$prompt" --image "$IMAGE" --num-chunk 7 --seed 0 --device cuda \
    --pipeline.diffusion-model.transformer.checkpoint-path "$MODEL/transformer_2" \
    --pipeline.diffusion-model.high-noise.0.transformer.checkpoint-path "$MODEL/transformer" \
    --pipeline.decoder.checkpoint-path "$MODEL/vae" --output "$out/$slug.mp4" 2>&1 | tee "$out/$slug.log"
python -c 'import json, sys; print(sys.argv[1], json.load(open(sys.argv[1]))["timings"])' "$out/$slug.json"
