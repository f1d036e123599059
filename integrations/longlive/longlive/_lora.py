"""The LoRA that belongs to a published model, merged into its weights when they are loaded."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from flashdreams.core.checkpoint import open_checkpoint, parse_source
from flashdreams.core.checkpoint.digest import file_state
from flashdreams.core.checkpoint.lora import merged, read_lora
from flashdreams.core.checkpoint.sources import RandomSource
from flashdreams.core.notices import say_once

if TYPE_CHECKING:
    from longlive.config import MergedLoraConfig


@torch.no_grad()
def merge(module: Any, config: MergedLoraConfig | None) -> Any:
    """``module`` with ``W + weight * B A`` in place of each weight ``W`` that the LoRA has, rounded once.

    The report of what was loaded names the LoRA's files too, so that they count in the digest of the weights.

    Raises:
        CheckpointError: it is no LoRA, or does not fit.
    """
    if config is None or config.weight == 0 or module.load_report is None:
        return module
    if isinstance(parse_source(config.checkpoint_path), RandomSource):
        return module
    tensors = module.checkpoint_root.state_dict()
    lora = read_lora(config.checkpoint_path, tensors, module.layouts.values())
    for key, patch in lora.patches.items():
        tensors[key].copy_(merged(tensors[key], [(config.weight, patch)], tensors[key].device))
    say_once(f"{config.checkpoint_path}: {lora.summary}, merged into the weights")
    checkpoint = open_checkpoint(config.checkpoint_path)
    checkpoint.fetch()
    report = module.load_report
    module.load_report = replace(
        report,
        files=(*report.files, *checkpoint.files),
        states=(*report.states, *(file_state(path) for path in checkpoint.files)),
    )
    return module
