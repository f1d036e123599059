# Sourced by bench.sh of wan21 and wan22, which set repo, checkpoints, slug, task, size, frames, steps and out:
# the time per denoising step of the original and of ours.
prompt="A ginger cat walks along a garden wall at sunset"
checkpoints=$(realpath "$checkpoints")
mkdir -p "$out"
out=$(realpath "$out")

python - <<'PYTHON'
import importlib.util
import torch
print(torch.__version__, torch.version.cuda, torch.cuda.get_device_name())
print("flash-attn:", "installed" if importlib.util.find_spec("flash_attn") else "not installed")
PYTHON
git -C "$repo" rev-parse HEAD

(cd "$repo" && python generate.py --task "$task" --size "$size" --ckpt_dir "$checkpoints" --prompt "$prompt" \
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
