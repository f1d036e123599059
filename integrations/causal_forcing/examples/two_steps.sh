#!/usr/bin/env bash
# A frame-wise file of two steps (Causal-Forcing++): four steps for the first frame, two for those that follow.
#
#   bash two_steps.sh FILE "A ginger cat walks along a garden wall at sunset"
set -euo pipefail
flashdreams-run causal-forcing-t2v-1.3b-framewise --ckpt-path "$1" --prompt "$2" \
    --pipeline.diffusion-model.scheduler.num-steps 2 \
    --pipeline.diffusion-model.scheduler.denoising-steps 1000 500 \
    --pipeline.diffusion-model.scheduler.first-chunk-steps 1000 750 500 250
