"""Weights that no model can have: not a number, infinite, or all zero."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flashdreams.core.checkpoint.errors import CheckpointError


def check_finite(value: Tensor, key: str, source: str, stored: torch.dtype) -> bool:
    """Whether the floating-point ``value`` holds anything but zeros.

    One sum, in which a NaN or an infinity survives, tells the usual case; only a sum that is not finite is looked into.

    Raises:
        CheckpointError: ``value`` holds NaN or infinity.
    """
    if value.dtype.itemsize == 1:  # no arithmetic on fp8; its few values are cheap to widen
        value = value.to(torch.bfloat16)
    total = value.sum().item()
    if math.isfinite(total):
        return total != 0 or bool(value.any())
    broken = int((~value.isfinite()).sum())
    if not broken:
        return True
    if stored.itemsize > value.dtype.itemsize and value.dtype == torch.float16:
        why = "float16 cannot hold what is stored; use bfloat16 or float32"
    else:
        why = "the file is damaged, or its training had failed; take another one"
    raise CheckpointError(f"{source}: {key} has {broken} of {value.numel()} values that are NaN or infinite: {why}")
