"""Convolutions with channels innermost in memory."""

from __future__ import annotations

import torch
from torch import nn

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
"""By the rank of the weights."""


def channels_last(module: nn.Module) -> int:
    """Lay the weights of all 2-D and 3-D convolutions in ``module`` out anew; returns how many there are.

    Where the kernel can, what they make has that layout too, so that nothing is converted between them. Numbers change
    by the order of sums.
    """
    count = 0
    for layer in module.modules():
        if isinstance(layer, (nn.Conv2d, nn.Conv3d)):
            layer.weight.data = layer.weight.detach().contiguous(memory_format=FORMATS[layer.weight.ndim])
            count += 1
    return count
