#!/usr/bin/env bash
# Both experts and the VAE from a folder on the disk.
#
#   bash local_folder.sh CausalWan2.2-I2V-A14B-Preview-Diffusers first.png "The cat jumps off the wall"
set -euo pipefail
model=$1 image=$2 prompt=$3
flashdreams-run fastvideo-causal-wan22-i2v-a14b --image "$image" --prompt "$prompt" \
    --pipeline.diffusion-model.transformer.checkpoint-path "$model/transformer_2" \
    --pipeline.diffusion-model.high-noise.0.transformer.checkpoint-path "$model/transformer" \
    --pipeline.decoder.checkpoint-path "$model/vae"
