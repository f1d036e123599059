"""What machines can do: their makers' figures, dense; and the machine at hand, measured (no torch at import)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """``tflops`` by dtype: dense matrix products with float32 sums; ``memory`` in GiB; ``bandwidth`` in GB/s."""

    name: str
    title: str
    memory: float
    bandwidth: float
    tflops: dict[str, float]

    def rate(self, dtype: str) -> float:
        """Matrix products in FLOP/s in ``dtype``, or in the next wider one that it has."""
        order = ("float16", "bfloat16", "float32")
        known = [name for name in order[order.index(dtype) if dtype in order else -1 :] if name in self.tflops]
        return 1e12 * self.tflops[known[0]]


def _gpu(name: str, title: str, memory: float, bandwidth: float, half: float, single: float) -> Device:
    return Device(name, title, memory, bandwidth, {"float16": half, "bfloat16": half, "float32": single})


DEVICES = {
    device.name: device
    for device in (
        _gpu("a100", "NVIDIA A100 SXM 80 GB", 80, 2039, 312, 156),
        _gpu("h100", "NVIDIA H100 SXM 80 GB", 80, 3350, 989, 495),
        _gpu("h200", "NVIDIA H200 SXM 141 GB", 141, 4800, 989, 495),
        _gpu("b200", "NVIDIA B200 180 GB", 180, 8000, 2250, 1125),
        _gpu("l40s", "NVIDIA L40S 48 GB", 48, 864, 362, 183),
        _gpu("4090", "NVIDIA GeForce RTX 4090 24 GB", 24, 1008, 165, 83),
        _gpu("5090", "NVIDIA GeForce RTX 5090 32 GB", 32, 1792, 209.5, 105),
    )
}
"""Single-precision figures are those of TF32 matrix products."""

SHARE = 0.65
"""Part of the makers' matrix rate that well-tuned runtimes reach in this kind of work (published runs: 0.5 to 0.75)."""


def this_cpu() -> Device:
    """The machine at hand: its memory, and the rate of its linear layers in float32 and bfloat16, measured now. (Other
    matrix products in bfloat16 may be ten times slower on a CPU without instructions for it.)"""
    import os
    import time

    import torch

    rates = {}
    for name in ("float32", "bfloat16"):
        x = torch.ones(1024, 1024, dtype=getattr(torch, name))
        best = float("inf")
        for _ in range(6):
            begun = time.perf_counter()
            torch.nn.functional.linear(x, x)
            best = min(best, time.perf_counter() - begun)
        rates[name] = 2 * 1024**3 / best / 1e12
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30 if hasattr(os, "sysconf") else 0.0
    title = f"this machine, {torch.get_num_threads()} threads"
    return Device("cpu", title, memory, 0.0, rates | {"float16": rates["float32"]})
