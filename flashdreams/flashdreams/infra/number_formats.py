"""Number formats that the processor at hand computes in slowly."""

from __future__ import annotations

from dataclasses import fields

import torch

from flashdreams.config import InstantiateConfig
from flashdreams.core.notices import say_once


def slow_formats(config: InstantiateConfig, device: str) -> str | None:
    """What to say before ``config``, a pipeline's, is loaded on ``device``, where parts of it compute in a format that
    this processor has no instructions for; ``None`` where none does.

    PyTorch falls back there to loops of its own: measured on a processor with AVX2 alone, a linear layer takes six
    times as long in bfloat16 as in float32, a convolution up to 850 times.
    """
    if device != "cpu":
        return None
    native = {"bfloat16": _supports("bf16"), "float16": _supports("fp16")}
    slow = {path: name for path, name in _formats(config, "pipeline").items() if not native.get(name, True)}
    if not slow:
        return None
    flags = ("--dtype" if path == _TRANSFORMER else f"--{path}.dtype" for path in slow if ".high_noise" not in path)
    changes = " ".join(f"{flag.replace('_', '-')} float32" for flag in flags)
    return (
        f"this processor has no instructions for {' and '.join(sorted(set(slow.values())))}: linear layers take "
        f"several times as long as in float32, convolutions a hundred times. Faster, in twice the memory: {changes}"
    )


def say_slow_formats(config: InstantiateConfig, device: str) -> None:
    """Say it once: wherever a pipeline is loaded, before its text encoder works or weights are read."""
    if slow := slow_formats(config, device):
        say_once(slow)


_TRANSFORMER = "pipeline.diffusion_model.transformer"
"""Its format, and that of further experts, is also a flag of the runner's own."""


def _formats(config: InstantiateConfig, path: str) -> dict[str, str]:
    """The formats in a config tree by the path of the part."""
    dtype = getattr(config, "dtype", None)
    found = {path: dtype} if dtype else {}
    for field in fields(config):
        value = getattr(config, field.name)
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, InstantiateConfig):
                found |= _formats(part, f"{path}.{field.name}")
    return found


def _supports(name: str) -> bool:
    """Whether oneDNN, by which PyTorch computes on CPUs, takes this format here; if PyTorch does not say so, yes."""
    known = getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", None)
    return not torch.backends.mkldnn.is_available() or known is None or bool(known())
