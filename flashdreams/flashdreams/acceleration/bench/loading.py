"""Loading of a model's parts beside the reading of their files alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from flashdreams.acceleration.bench.report import Entry
from flashdreams.acceleration.bench.sampling import Plan, interleave, waiter
from flashdreams.core.checkpoint.sources import LocalSource, parse_source
from flashdreams.infra.config import ModuleConfig, PipelineConfig
from flashdreams.infra.loading import expert_configs

_PIECE = 16 * 2**20


def parts_of(config: PipelineConfig) -> dict[str, ModuleConfig]:
    """The modules of a model that have weights, by name."""
    experts = expert_configs(config.diffusion_model)
    parts: dict[str, Any] = {
        "transformer" if len(experts) == 1 else f"transformer.{number}": expert for number, expert in enumerate(experts)
    }
    others = {name: getattr(config, name) for name in ("decoder", "encoder", "text_encoder", "image_encoder")}
    return parts | {name: part for name, part in others.items() if part is not None}


def measure_load(config: PipelineConfig, *, device: str, plan: Plan) -> tuple[list[Entry], dict[str, str]]:
    """Times of ``setup()`` of each part whose weights are a file or folder here, in the system's cache."""
    entries, facts = [], {}
    for name, part in parts_of(config).items():
        files = _files(part)
        if not files:
            facts[name] = f"not measured: {part.checkpoint_path or 'random weights'} is no file or folder here"
            continue
        cases = {"bound": lambda files=files: _read(files), name: lambda part=part: part.setup(device=device)}
        times = interleave(cases, plan, waiter(torch.device(device)))
        size = sum(file.stat().st_size for file in files)
        entries.append(
            Entry(name, times[name], times["bound"], note=f"{size / 2**20:.1f} MiB; the bound reads the bytes")
        )
    return entries, facts


def _files(config: ModuleConfig) -> list[Path]:
    if config.checkpoint_path is None:
        return []
    source = parse_source(config.checkpoint_path)
    if not isinstance(source, LocalSource):
        return []
    path = source.path
    return [path] if path.is_file() else sorted(path.glob("*.safetensors"))


def _read(files: list[Path]) -> None:
    piece = memoryview(bytearray(_PIECE))
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(piece):
                pass
