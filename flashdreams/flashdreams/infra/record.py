"""The run record: a JSON file beside the video with everything needed to make it again."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from flashdreams._version import __version__
from flashdreams.config import to_dict

if TYPE_CHECKING:
    from flashdreams.infra.config import RunnerConfig


def environment(device: str) -> dict[str, Any]:
    """What the numbers of a run depend on besides its config."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "flashdreams": __version__,
        "platform": f"{platform.system()}-{platform.machine()}",
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else device,
    }


def write_record(
    path: Path,
    config: RunnerConfig,
    *,
    seed: int,
    device: str,
    checkpoint: dict[str, str | None],
    timings: dict[str, Any],
    output: dict[str, Any],
) -> None:
    """Write the record of a finished or interrupted run to ``path``, in one step."""
    record = {
        "flashdreams": __version__,
        "slug": config.runner_name,
        "config": to_dict(config),
        "seed": seed,
        "environment": environment(device),
        "checkpoint": checkpoint,
        "inputs": {name: file_digest(file) for name in ("image", "prompt_file") if (file := getattr(config, name))},
        "output": output,
        "timings": timings,
    }
    partial = path.with_name(path.name + ".part")
    partial.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(partial, path)


def file_digest(path: Path) -> str:
    """``sha256:<hex>`` of a file's bytes."""
    with path.open("rb") as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()
