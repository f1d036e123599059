"""Which block-sparse backends work for a given use, which is best, and what the others lack."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from dataclasses import dataclass

import torch

INSTALLED = {package: importlib.util.find_spec(package) is not None for package in ("block_sparse_attn", "triton")}
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Use:
    """What decides which backends work: where, in what precision, with which sizes, whether gradients are wanted."""

    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    block_q: int = 128
    block_k: int = 128
    head_dim: int = 128
    grad: bool = False


def choose(use: Use) -> tuple[str, str]:
    """The best backend for ``use``, and the notice about it: why, and what a faster one lacks."""
    passed_over = []
    for name in ("block_sparse_attn", "flex") if use.device == "cuda" else ():
        needed = lacks(name, use)
        if not needed:
            return name, "; ".join([f"block-sparse attention: {name}, the fastest here", *passed_over])
        passed_over.append(f"{name} would be faster but needs {needed}")
    if use.device != "cuda":
        passed_over.append("faster ones need a CUDA device")
    return "gather", "; ".join([f"block-sparse attention: gather, the fastest here on {use.device}", *passed_over])


def lacks(name: str, use: Use) -> str:
    """What backend ``name`` needs for ``use`` and does not find; empty if it works."""
    kind = str(use.dtype).removeprefix("torch.")
    if name == "block_sparse_attn":
        if use.device != "cuda":
            return f"a CUDA device (got {use.device})"
        if use.dtype not in _HALF:
            return f"float16 or bfloat16 (got {kind})"
        if (use.block_q, use.block_k) != (128, 128):
            return f"blocks of 128 tokens (got {use.block_q} and {use.block_k})"
        if use.head_dim not in (32, 64, 128):
            return f"heads of 32, 64 or 128 features (got {use.head_dim})"
        if not INSTALLED["block_sparse_attn"]:
            return "the package block-sparse-attn (build it from the sources, mit-han-lab/Block-Sparse-Attention)"
    if name in ("flex", "flex_eager") and use.device != "cuda" and use.grad:
        return f"a CUDA device to train through (got {use.device})"
    if name == "flex":
        return _lacks_compiled_flex(use, kind)
    return ""


def _lacks_compiled_flex(use: Use, kind: str) -> str:
    if use.dtype not in (torch.float32, *_HALF):
        return f"float32, float16 or bfloat16 (got {kind})"
    if use.device == "cuda":
        if use.block_q % 128 or use.block_k % 128:
            return f"blocks of a multiple of 128 tokens on CUDA (got {use.block_q} and {use.block_k})"
        if use.head_dim < 16:
            return f"heads of at least 16 features on CUDA (got {use.head_dim})"
        return "" if INSTALLED["triton"] else "the package triton (it comes with the CUDA builds of PyTorch)"
    if use.device != "cpu":
        return f"a CUDA device or a CPU (got {use.device})"
    if torch.compiler.is_compiling():  # then there is what a compiler needs, and looking for it cannot be traced
        return ""
    if sys.platform == "darwin" or not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        return "a CPU with AVX2, and not macOS"
    compiler = os.environ.get("CXX", "g++")
    return "" if shutil.which(compiler) else f"a C++ compiler ({compiler} is not on PATH; CXX may name another)"
