"""Whether a device has the memory for some weights, asked before the first of them is read."""

from __future__ import annotations

import os

import torch

from flashdreams.core.checkpoint.errors import CheckpointError


def check_room(need: int, device: torch.device, source: str) -> None:
    """Refuse what cannot fit.

    Args:
        need: bytes to be allocated on ``device``.

    Raises:
        CheckpointError: with what is needed, what is free, and what helps.
    """
    free = _free(device)
    if free is not None and need > free:
        raise CheckpointError(
            f"{source} takes {need / 2**30:.1f} GiB on {device}, which has {free / 2**30:.1f} GiB free; close what "
            "else uses it, choose a smaller dtype, or another device"
        )


def _free(device: torch.device) -> int | None:
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    if device.type == "cpu" and os.path.exists("/proc/meminfo"):
        with open("/proc/meminfo") as lines:
            table = dict(line.split(":", 1) for line in lines)
        return sum(int(table.get(name, "0 kB").split()[0]) * 1024 for name in ("MemAvailable", "SwapFree")) or None
    return None
