"""From a module config to a module with weights, ready for inference."""

from __future__ import annotations

from typing import Any

import torch

from flashdreams.config import import_object
from flashdreams.core.checkpoint import CheckpointError, load_checkpoint
from flashdreams.core.checkpoint.meta import lost_tensors, parameters_on_meta
from flashdreams.infra.config import ModuleConfig


def setup_module(config: ModuleConfig, device: str) -> Any:
    """Build ``config``'s class; if it names a checkpoint, with its parameters on meta, so that no weight is made twice.

    Without a checkpoint the weights are random, and the same in every process. A class may say which of its submodules
    the checkpoint describes (``checkpoint_root``). The file's digest is kept as ``checkpoint_digest``, ``None`` for
    random weights. Buffers that no checkpoint holds are as the constructor made them, on ``device`` in the dtype.
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
    digest = None
    if config.checkpoint_path is not None:
        report = load_checkpoint(
            getattr(module, "checkpoint_root", module),
            config.checkpoint_path,
            transform=import_object(config.state_dict_transform) if config.state_dict_transform else None,
            allow_missing=config.allow_missing,
            dtype=dtype,
            device=device,
        )
        digest = report.digest
        if lost := lost_tensors(module):
            raise CheckpointError(
                f"{type(module).__name__} has {len(lost)} tensors that no checkpoint fills ({', '.join(lost[:5])}); "
                "make them in the constructor from values, or register them as persistent buffers"
            )
    module.to(device=device, dtype=dtype)
    module.checkpoint_digest = digest
    return module.eval().requires_grad_(False)
