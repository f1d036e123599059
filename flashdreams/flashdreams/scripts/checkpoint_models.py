"""What the actions of ``flashdreams checkpoint`` work on: parts of models, headers, manifests."""

from __future__ import annotations

import gzip
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flashdreams.config import ConfigError, import_object
from flashdreams.core.checkpoint import open_checkpoint
from flashdreams.core.checkpoint.choose import Candidate
from flashdreams.core.checkpoint.keymap import KeyMap
from flashdreams.core.checkpoint.mapped import DTYPE_NAMES, TORCH_DTYPES
from flashdreams.infra.config import ModuleConfig, PipelineConfig
from flashdreams.infra.errors import UserError
from flashdreams.infra.loading import build_on_meta, candidates, expert_configs
from flashdreams.plugins.registry import discover_runners, get_runner

_MAX_MANIFEST = 100_000_000


@dataclass(frozen=True)
class Part:
    """A part of a model on the meta device, and how checkpoints of it are read."""

    name: str
    config: ModuleConfig
    root: nn.Module
    layouts: Mapping[str, KeyMap]
    candidates: Mapping[str, Candidate]

    @property
    def wanted(self) -> dict[str, Tensor]:
        return self.root.state_dict()


def model_part(slug: str, name: str, transform: str | None) -> Part:
    """The part ``name`` of the model ``slug``; ``transform`` overrules those the model declares."""
    config = _part_config(get_runner(slug).pipeline, name)
    module = build_on_meta(config)
    options: Mapping[str, Candidate] = {transform: named(transform)} if transform else candidates(config)
    layouts = getattr(module, "layouts", {})
    return Part(f"{slug} {name}", config, getattr(module, "checkpoint_root", module), layouts, options)


def _part_config(pipeline: PipelineConfig, name: str) -> ModuleConfig:
    model = pipeline.diffusion_model
    parts: dict[str, ModuleConfig | None] = {
        "transformer": model.transformer,
        **{f"transformer.{i}": config for i, config in enumerate(expert_configs(model))},
        "text_encoder": pipeline.text_encoder,
        "image_encoder": pipeline.image_encoder,
        "encoder": pipeline.encoder,
        "decoder": pipeline.decoder,
    }
    if (config := parts.get(name)) is None:
        has = [part for part, config in parts.items() if config]
        raise UserError(f"{pipeline.name} has no part {name!r}; it has {', '.join(has)}")
    return config


def named(reference: str) -> Candidate:
    """The function or key map that the command line names."""
    try:
        return import_object(reference)
    except (ImportError, ConfigError) as error:
        raise UserError(f"--transform {reference}: {error}") from None


def header_of(source: str) -> dict[str, Tensor]:
    """The tensors of a checkpoint or manifest, on the meta device."""
    header = read_manifest(source).meta() if is_manifest(source) else open_checkpoint(source).meta()
    if not header:
        raise UserError(f"{source} has no tensors; give a file, folder or repository of weights")
    return header


@dataclass(frozen=True)
class Manifest:
    """Keys, shapes and number formats without weights; ``md5`` is the published hash of keys and shapes."""

    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    md5: str | None = None

    def meta(self) -> dict[str, Tensor]:
        return {key: torch.empty(shape, dtype=dtype, device="meta") for key, (shape, dtype) in self.tensors.items()}


def is_manifest(source: str) -> bool:
    """Whether ``source`` names a local manifest (an index of shards is none)."""
    return bool(re.search(r"(?<!\.index)\.json(?:\.gz)?$", source)) and "://" not in source


def read_manifest(path: str) -> Manifest:
    """Read ``{"tensors": {key: {"shape": [...], "dtype": "F32"}}, "keyshape_md5": ...}``, gzipped or not.

    Raises:
        UserError: it cannot be read, or is something else.
    """
    try:
        data = Path(path).read_bytes()
        if data.startswith(b"\x1f\x8b"):
            with gzip.open(path) as file:
                data = file.read(_MAX_MANIFEST)
        content = json.loads(data)
        stated = content["tensors"].items()
        tensors = {key: (_shape(value["shape"]), _dtype(value.get("dtype"))) for key, value in stated}
        return Manifest(tensors, content.get("keyshape_md5"))
    except OSError as error:
        raise UserError(f"manifest {path} cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, EOFError, RecursionError) as error:
        raise UserError(
            f"{path} is no manifest ({type(error).__name__}: {str(error)[:100]}); expected JSON with "
            '"tensors": {key: {"shape": [...], "dtype": ...}}'
        ) from None


def _shape(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(size) is int and size >= 0 for size in value):
        raise ValueError(f"{value!r} is no shape")
    if math.prod(value) >= 2**60:
        raise ValueError(f"{value!r} is larger than any memory")
    return tuple(value)


def _dtype(name: Any) -> torch.dtype:
    """Manifests write ``F32`` or ``float32``; what is not known counts as float32, since keys and shapes matter."""
    found = TORCH_DTYPES.get(name) or getattr(torch, str(name), None)
    return found if isinstance(found, torch.dtype) and found in DTYPE_NAMES else torch.float32


def is_slug(text: str) -> bool:
    """Whether a runner has this name."""
    return text in discover_runners()
