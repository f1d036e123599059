"""From a module config to a module with weights, ready for inference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from flashdreams.config import import_object
from flashdreams.core.checkpoint import CheckpointError, LoadReport, load_checkpoint, open_checkpoint, parse_source
from flashdreams.core.checkpoint.choose import choose_transform
from flashdreams.core.checkpoint.keymap import KeyMap
from flashdreams.core.checkpoint.meta import lost_tensors, parameters_on_meta
from flashdreams.core.checkpoint.sources import RandomSource, ZeroSource
from flashdreams.core.notices import say_once
from flashdreams.infra.config import DiffusionModelConfig, ModuleConfig, TransformerConfig


class CheckpointModule(nn.Module):
    """A part of a pipeline, whose weights may come from a checkpoint."""

    layouts: ClassVar[Mapping[str, KeyMap]] = {}
    """Key maps to the module's own names from the other layouts in which its weights and LoRAs are published."""

    load_report: LoadReport | None = None
    """What was loaded; ``None`` for random weights."""

    @property
    def checkpoint_digest(self) -> str | None:
        """Digest of the files of weights, read when it is first asked for; ``None`` for random ones."""
        return None if self.load_report is None else self.load_report.digest


def build_on_meta(config: ModuleConfig) -> Any:
    """The module of ``config`` without memory for its weights: for what names and shapes alone can answer."""
    with parameters_on_meta():
        return import_object(config._target)(config)


def expert_configs(model: DiffusionModelConfig) -> list[TransformerConfig]:
    """The transformers of a model by number, that of the highest noise first."""
    return [*(e.transformer for e in sorted(model.high_noise, key=lambda e: -e.sigma_low)), model.transformer]


def candidates(config: ModuleConfig) -> dict[str, Any]:
    """The transforms that a checkpoint of ``config`` may need, by name: the one it names, or those it declares."""
    if config.state_dict_transform:
        return {config.state_dict_transform: import_object(config.state_dict_transform)}
    return {"the keys as they are": None, **{name: import_object(name) for name in config.transforms}}


def choose(config: ModuleConfig, root: nn.Module) -> Any:
    """The transform of ``config``'s checkpoint: the one named, else the declared one that fits the file's header."""
    options = candidates(config)
    assert config.checkpoint_path is not None
    if isinstance(parse_source(config.checkpoint_path), RandomSource | ZeroSource):
        return None
    if len(options) == 1:
        return next(iter(options.values()))
    header = open_checkpoint(config.checkpoint_path).meta()
    name, _, match = choose_transform(
        root.state_dict(), header, options, allow_missing=config.allow_missing, dtype=getattr(torch, config.dtype)
    )
    if match.ok and options[name] is not None:
        say_once(f"{config.checkpoint_path} has the layout that {name} reads")
    return options[name]


def setup_module(config: ModuleConfig, device: str) -> Any:
    """Build ``config``'s class; if it names a checkpoint, with its parameters on meta, so that no weight is made twice.

    Without a checkpoint the weights are random, and the same in every process. A class may say which of its submodules
    the checkpoint describes (``checkpoint_root``). What was loaded is kept as ``load_report``. Buffers that no
    checkpoint holds are as the constructor made them, on ``device`` in the dtype.
    """
    target = import_object(config._target)
    dtype = getattr(torch, config.dtype)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if config.checkpoint_path is None:
            module = target(config)
        else:
            with parameters_on_meta():
                module = target(config)
    report = None
    if config.checkpoint_path is not None:
        report = load_checkpoint(
            getattr(module, "checkpoint_root", module),
            config.checkpoint_path,
            transform=choose(config, getattr(module, "checkpoint_root", module)),
            allow_missing=config.allow_missing,
            dtype=dtype,
            device=device,
        )
        if lost := lost_tensors(module):
            raise CheckpointError(
                f"{type(module).__name__} has {len(lost)} tensors that no checkpoint fills ({', '.join(lost[:5])}); "
                "make them in the constructor from values, or register them as persistent buffers"
            )
    module.to(device=device, dtype=dtype)
    module.load_report = report
    return module.eval().requires_grad_(False)
