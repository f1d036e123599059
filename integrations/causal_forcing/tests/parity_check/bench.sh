#!/usr/bin/env bash
# Seconds per chunk, original and ours, on one stack: the same environment (PyTorch, CUDA), GPU, weights, prompt, 480x832,
# 21 latent frames (for the frame-wise file SLUG=causal-forcing-t2v-1.3b-framewise CHUNKS=21). Nothing else should run on the GPU.
#
#   REPO=Causal-Forcing CHECKPOINT=causal_forcing.pt CONFIG=configs/causal_forcing_dmd_chunkwise.yaml bash bench.sh
#
# The original prints its profile (initialisation, diffusion by block, VAE) when asked to; ours writes the run record.
set -euo pipefail

: "${REPO:?set REPO to a clone of the original}"
: "${CHECKPOINT:?set CHECKPOINT to causal_forcing.pt}"
: "${CONFIG:?set CONFIG to the settings of that file, from the root of the clone}"
slug="${SLUG:-causal-forcing-t2v-1.3b}" entry="${ENTRY:-generator_ema}" chunks="${CHUNKS:-7}"
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

(cd "$REPO" && python - "$checkpoint" "$prompt" "$CONFIG" "$entry" <<'PYTHON') 2>&1 | tee "$out/original.log"
import sys
import torch
from omegaconf import OmegaConf
from pipeline import CausalInferencePipeline
checkpoint, prompt, settings, entry = sys.argv[1:]
torch.set_grad_enabled(False)
config = OmegaConf.merge(OmegaConf.load("configs/default_config.yaml"), OmegaConf.load(settings))
pipeline = CausalInferencePipeline(config, device=torch.device("cuda"))
state = torch.load(checkpoint, map_location="cpu")[entry]
pipeline.generator.load_state_dict({key.replace("_fsdp_wrapped_module.", ""): value for key, value in state.items()})
pipeline = pipeline.to(dtype=torch.bfloat16)
for part in (pipeline.text_encoder, pipeline.generator, pipeline.vae):
    part.to("cuda")
noise = torch.randn(1, 21, 16, 60, 104, device="cuda", dtype=torch.bfloat16)
for _ in range(2):  # the first run warms up
    pipeline.inference(noise=noise, text_prompts=[prompt], return_latents=True, profile=True)
PYTHON

flashdreams-run "$slug" --prompt "$prompt" --num-chunk "$chunks" --seed 0 --device cuda \
    --ckpt-path "$checkpoint#$entry" --output "$out/$slug.mp4" 2>&1 | tee "$out/$slug.log"
python -c 'import json, sys; print(sys.argv[1], json.load(open(sys.argv[1]))["timings"])' "$out/$slug.json"
