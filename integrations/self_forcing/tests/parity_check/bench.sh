#!/usr/bin/env bash
# Seconds per chunk, original and ours, on one stack: the same environment (PyTorch, CUDA), GPU, weights, prompt, 480x832,
# 21 latent frames. Nothing else should run on the GPU.
#
#   REPO=Self-Forcing CHECKPOINT=self_forcing_dmd.pt bash bench.sh
#
# The original prints its profile (initialisation, diffusion by block, VAE) when asked to; ours writes the run record.
set -euo pipefail

: "${REPO:?set REPO to a clone of the original at 33593df3}"
: "${CHECKPOINT:?set CHECKPOINT to self_forcing_dmd.pt}"
out="${OUT:-bench}"
prompt="A ginger cat walks along a garden wall at sunset"
checkpoint=$(realpath "$CHECKPOINT")
mkdir -p "$out"
out=$(realpath "$out")

python - <<'PYTHON'
import importlib.util
import torch
print(torch.__version__, torch.version.cuda, torch.cuda.get_device_name())
print("flash-attn:", "installed" if importlib.util.find_spec("flash_attn") else "not installed")
PYTHON
git -C "$REPO" rev-parse HEAD

(cd "$REPO" && python - "$checkpoint" "$prompt" <<'PYTHON') 2>&1 | tee "$out/original.log"
import sys
import torch
from omegaconf import OmegaConf
from pipeline import CausalInferencePipeline
checkpoint, prompt = sys.argv[1:]
torch.set_grad_enabled(False)
config = OmegaConf.merge(OmegaConf.load("configs/default_config.yaml"), OmegaConf.load("configs/self_forcing_dmd.yaml"))
pipeline = CausalInferencePipeline(config, device=torch.device("cuda"))
pipeline.generator.load_state_dict(torch.load(checkpoint, map_location="cpu")["generator_ema"])
pipeline = pipeline.to(dtype=torch.bfloat16)
for part in (pipeline.text_encoder, pipeline.generator, pipeline.vae):
    part.to("cuda")
noise = torch.randn(1, 21, 16, 60, 104, device="cuda", dtype=torch.bfloat16)
for _ in range(2):  # the first run warms up
    pipeline.inference(noise=noise, text_prompts=[prompt], return_latents=True, profile=True)
PYTHON

for slug in self-forcing-t2v-1.3b self-forcing-t2v-1.3b-taehv; do
    flashdreams-run "$slug" --prompt "$prompt" --num-chunk 7 --seed 0 --device cuda --ckpt-path "$checkpoint" \
        --output "$out/$slug.mp4" 2>&1 | tee "$out/$slug.log"
    python -c 'import json, sys; print(sys.argv[1], json.load(open(sys.argv[1]))["timings"])' "$out/$slug.json"
done
