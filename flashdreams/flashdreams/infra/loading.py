"""From a module config to a module with weights, ready for inference."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from flashdreams.config import import_object
from flashdreams.core.checkpoint import load_checkpoint
from flashdreams.infra.config import ModuleConfig


def setup_module(config: ModuleConfig, device: str) -> Any:
    """Build ``config``'s class; if it names a checkpoint, on the meta device first, so that no weight is made twice.

    Without a checkpoint the weights are random, and the same in every process. A class may say which of its submodules the checkpoint describes (``checkpoint_root``). The digest of the file is
    kept as ``checkpoint_digest``, ``None`` for random weights.
    """
    target = import_object(config._target)
    dtype = getattr(torch, config.dtype)
    if config.checkpoint_path is None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            module = target(config).to(device=device, dtype=dtype)
        module.checkpoint_digest = None
    else:
        transform = import_object(config.state_dict_transform) if config.state_dict_transform else None
        with torch.device("meta"):
            module = target(config)
        report = load_checkpoint(
            getattr(module, "checkpoint_root", module),
            config.checkpoint_path,
            transform=transform,
            allow_missing=config.allow_missing,
            dtype=dtype,
            device=device,
        )
        module.checkpoint_digest = report.digest
        left = [name for name, tensor in named_tensors(module) if tensor.is_meta]
        if left:
            raise RuntimeError(f"{type(module).__name__} has tensors that no checkpoint fills: {', '.join(left[:5])}")
    return module.eval().requires_grad_(False)


def named_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and buffers, non-persistent ones included."""
    return [*module.named_parameters(), *module.named_buffers()]
