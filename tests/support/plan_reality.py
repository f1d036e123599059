"""What ``flashdreams plan`` says of memory, beside a real run of the same model on the CPU.

    python tests/support/plan_reality.py

Each model runs in a process of its own with random weights until its window is full and one chunk on. Measured is the
highest resident memory of that process above what it held before the model was loaded (Linux; small blocks are
mapped one by one, so that what was freed is gone).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

SLICES: dict[str, tuple[str, int, int, int, int | None]] = {
    "Self-Forcing 1.3B, 4 of 30 blocks, 128x208": ("self-forcing-t2v-1.3b", 4, 128, 208, None),
    "Wan2.2 5B, 2 of 30 blocks, 192x320, 5 frames": ("wan22-ti2v-5b", 2, 192, 320, 5),
    "Cosmos-Predict2.5 2B, 2 of 28 blocks, 128x224, 9 frames": ("cosmos-predict2.5-2b", 2, 128, 224, 9),
}
"""Runner, blocks, height, width, and the frames of a clip that is made at once. Two steps, as memory is the same."""

CHUNKS = 3
"""From the third on a causal decoder works at its full size."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--only", help="part of a name")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(_measure(arguments.one)))
        return
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    for name in SLICES:
        if arguments.only and arguments.only not in name:
            continue
        command = [sys.executable, __file__, "--one", name]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
        sizes = {part: round(size / 2**20) for part, size in json.loads(done.stdout.splitlines()[-1]).items()}
        planned, real = sizes.pop("planned"), sizes.pop("real")
        parts = ", ".join(f"{part} {size}" for part, size in sizes.items())
        print(f"{name}: planned {planned} MiB, real {real} MiB: {real / planned:.3f} ({parts})", flush=True)


def _config(name: str) -> tuple[Any, int | None]:
    from flashdreams.config import derive_config
    from flashdreams.plugins.registry import get_runner

    slug, layers, height, width, frames = SLICES[name]
    model: dict[str, Any] = {"transformer": {"dtype": "float32", "network": {"num_layers": layers}}}
    if frames:
        model["scheduler"] = {"num_steps": 2}
    changes = {"height": height, "width": width, "text_encoder": None, "diffusion_model": model}
    return derive_config(get_runner(slug), pipeline=changes).pipeline, frames


def _measure(name: str) -> dict[str, Any]:
    import torch

    from flashdreams.acceleration.plan import plan_model
    from flashdreams.infra.load import load_pipeline, with_checkpoints_from

    config, frames = _config(name)
    plan = plan_model(config, num_frames=frames)
    _warm_up()
    before = _status("VmRSS")
    pipeline = load_pipeline(with_checkpoints_from(config, "random:0"))
    length, width = config.diffusion_model.transformer.text_shape
    text = torch.zeros(1, length or 1, width or 1)
    rollout = pipeline.rollout(
        "",
        conditions={"text": text, "negative_text": text.clone()},
        num_frames=frames,
        num_chunk=None if frames else CHUNKS,
    )
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of loading
    for chunk in rollout:
        del chunk
    real = _status("VmHWM") - before
    return {"planned": plan.peak, "real": real, "weights": plan.weights, "state": plan.state, **plan.transient}


def _warm_up() -> None:
    """Have the libraries' code, threads and small buffers in memory before anything is measured."""
    import torch
    import torch.nn.functional as F

    with torch.no_grad():
        x = torch.randn(1, 16, 4, 16, 16)
        x = F.conv3d(x, torch.randn(16, 16, 3, 3, 3), padding=1)
        F.conv2d(x[0], torch.randn(16, 4, 3, 3)[:, :4], padding=1)
        q = torch.randn(1, 2, 64, 64)
        F.scaled_dot_product_attention(q, q, q)
        F.linear(torch.randn(64, 64), torch.randn(64, 64))
    gc.collect()


def _status(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return 1024 * int(found[1])


if __name__ == "__main__":
    main()
