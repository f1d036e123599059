"""Attention backends by name. Each takes ``q [B, L, H, D]`` and ``k, v [B, S, H, D]`` and returns ``[B, L, H, D]``."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Backend = Callable[[Tensor, Tensor, Tensor, Tensor | None, float], Tensor]


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """PyTorch's fused attention; picks its own kernel per device."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).transpose(1, 2)


def reference(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Explicit softmax, in at least float32: slow, obvious, and the quickest to train through on a CPU."""
    scores = torch.einsum("blhd,bshd->bhls", q, k) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(v.dtype)
    return torch.einsum("bhls,bshd->blhd", weights, v)


def flash_attn(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """The flash-attn package (CUDA, half precision, no mask)."""
    if mask is not None:
        raise ValueError("the flash_attn backend takes no mask; use 'sdpa'")
    from flash_attn import flash_attn_func  # ty: ignore[import-not-found]

    return flash_attn_func(q, k, v, softmax_scale=scale)


BACKENDS: dict[str, Backend] = {"sdpa": sdpa, "reference": reference}
if importlib.util.find_spec("flash_attn") is not None:
    BACKENDS["flash_attn"] = flash_attn


def error_limit(dtype: torch.dtype) -> float:
    """Absolute error that a self-test allows, on inputs from a standard normal distribution."""
    return 3e-2 if dtype in (torch.float16, torch.bfloat16) else 1e-5


def self_test(name: str, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> float:
    """Largest absolute error of a backend against the float64 reference on a small odd-sized case.

    Raises:
        RuntimeError: the error is above 1e-5 in float32, 3e-2 in half precision; or the output is not finite.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    shapes = [(2, tokens, 3, 64) for tokens in (37, 53, 53)]
    q, k, v = (torch.randn(s, generator=generator, dtype=torch.float64, device="cpu") for s in shapes)
    want = reference(q, k, v, None, 1 / math.sqrt(64))
    got = BACKENDS[name](*(x.to(device, dtype) for x in (q, k, v)), None, 1 / math.sqrt(64))
    error = (got.double().cpu() - want).abs().max().item()
    limit = error_limit(dtype)
    if not error <= limit:
        raise RuntimeError(
            f"attention backend {name!r} is wrong on {device} in {dtype}: error {error:.1e}, limit {limit:.0e}; "
            "use backend 'sdpa' (flashdreams doctor lists what works here)"
        )
    return error
