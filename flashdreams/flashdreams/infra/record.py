"""The run record: a JSON file beside the video with everything needed to make it again."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from flashdreams._version import __version__
from flashdreams.config import to_dict

if TYPE_CHECKING:
    from flashdreams.infra.config import RunnerConfig
    from flashdreams.infra.pipeline import StreamInferencePipeline
    from flashdreams.infra.postprocess.chain import Chain

INPUTS = ("image", "last_image", "video", "prompt_file", "prompt_embeds")
"""Fields of the runner's config that name files which the video depends on."""


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
    pipeline: StreamInferencePipeline,
    postprocessor: Chain,
    *,
    seed: int,
    device: str,
    timings: dict[str, Any],
    output: dict[str, Any],
) -> None:
    """Write the record of a finished or interrupted run to ``path``, in one step.

    Here the files of weights are read for their digests, where those are not known from earlier.
    """
    loras = pipeline.loras.summary()
    digests = pipeline.checkpoint_digests() | {f"lora.{name}": lora["digest"] for name, lora in loras.items()}
    digests |= {f"postprocess.{part}": digest for part, digest in postprocessor.checkpoint_digests().items()}
    record = {
        "flashdreams": __version__,
        "slug": config.runner_name,
        "config": to_dict(config),
        "seed": seed,
        "environment": environment(device),
        "checkpoint": digests,
        "files": loaded_files(pipeline) | {f"postprocess.{k}": v for k, v in loaded_files(postprocessor).items()},
        "loras": loras,
        "acceleration": pipeline.acceleration.notes,
        "approximations": pipeline.acceleration.approximations,
        "postprocess": to_dict(postprocessor.config)["stages"],
        "inputs": {name: file_digest(file) for name, file in input_files(config).items()},
        "output": output,
        "timings": timings,
    }
    partial = path.with_name(path.name + ".part")
    partial.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(partial, path)


def loaded_files(module: nn.Module) -> dict[str, dict[str, str]]:
    """Digest of every file that weights were loaded from, by part of ``module`` and name."""
    reports = {name: getattr(part, "load_report", None) for name, part in module.named_modules()}
    return {name: report.digests for name, report in reports.items() if report is not None and report.files}


def input_files(config: RunnerConfig) -> dict[str, Path]:
    """Files that the video depends on, by field; ``control`` too, where it is one."""
    files = {name: file for name in INPUTS if (file := getattr(config, name))}
    with suppress(OSError, ValueError):  # the text of a control may be no name a file can have
        if config.control and Path(config.control).is_file():
            files["control"] = Path(config.control)
    return files


def file_digest(path: Path) -> str:
    """``sha256:<hex>`` of a file's bytes."""
    with path.open("rb") as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()
