"""Attention over selected blocks of keys: one function, several backends, the choice among them automatic."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flashdreams.core.attention.backends import BACKENDS, error_limit
from flashdreams.core.attention.block_sparse_backends import BLOCK_SPARSE_BACKENDS, dense
from flashdreams.core.attention.block_sparse_choice import Use, choose, lacks
from flashdreams.core.notices import say_once


def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_mask: Tensor,
    *,
    block_q: int = 128,
    block_k: int = 128,
    scale: float | None = None,
    backend: str = "auto",
    selected: int | None = None,
) -> Tensor:
    """Softmax attention of ``q [B, L, H, D]`` over the selected blocks of ``k, v [B, S, H, D]``; ``[B, L, H, D]``.

    Queries in a block that selects nothing get 0. ``L`` and ``S`` need not be multiples of the block sizes: the last
    block is then shorter.

    Args:
        block_mask: boolean ``[B or 1, H or 1, ceil(L / block_q), ceil(S / block_k)]``; True: every query of that block
            attends to every key of that block.
        block_q, block_k: tokens in a block of queries, of keys.
        scale: factor of the scores; ``1 / sqrt(D)`` by default.
        backend: ``"auto"`` takes the best that works here and says once which. Or a name: ``"block_sparse_attn"`` (the
            optional package of that name: CUDA, half precision, blocks of 128), ``"flex"`` (FlexAttention, compiled),
            ``"gather"`` (ordinary attention over copies of the selected keys, row by row; quickest on a CPU),
            ``"flex_eager"`` and ``"dense"`` (references, as large as the whole matrix of scores).
        selected: how many pairs of blocks the mask selects for each batch entry and head, where that is known without
            looking. It changes no result: it is what work is counted by on the meta device, which has no masks to look
            at; without it, every pair.

    Raises:
        ValueError: shapes do not fit, or the named backend cannot work here; says what it lacks.
    """
    _check(q, k, v, block_mask, block_q, block_k)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if q.is_meta:
        keys = k.shape[1] if selected is None else min(k.shape[1], round(selected * block_k / block_mask.shape[2]))
        return BACKENDS["sdpa"](q, k[:, :keys], v[:, :keys], None, scale)
    grad = q.requires_grad or k.requires_grad or v.requires_grad
    name = _backend(backend, q.device.type, q.dtype, block_q, block_k, q.shape[-1], grad)
    return BLOCK_SPARSE_BACKENDS[name](q, k, v, block_mask, (block_q, block_k), scale)


def block_sparse_self_test(name: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> float:
    """Largest absolute error of a backend against ``dense`` in float64: an empty row, ragged ends, a mask per head.

    Raises:
        ValueError: the backend cannot work there.
        RuntimeError: the error is above 1e-5 in float32, 3e-2 in half precision; or the output is not finite.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    shapes = [(2, tokens, 2, 64) for tokens in (300, 450, 450)]
    q, k, v = (torch.randn(s, generator=generator, dtype=torch.float64, device="cpu") for s in shapes)
    mask = torch.rand((2, 2, 3, 4), generator=generator, device="cpu") < 0.5
    mask[1, 0, 2] = False
    want = dense(q, k, v, mask, (128, 128), 1 / 8)
    given = (x.to(device, dtype) for x in (q, k, v))
    got = block_sparse_attention(*given, mask.to(device), backend=name)
    error = (got.double().cpu() - want).abs().max().item()
    if not error <= error_limit(dtype):
        raise RuntimeError(
            f"block-sparse backend {name!r} is wrong on {device} in {dtype}: error {error:.1e}, "
            f"limit {error_limit(dtype):.0e}; use 'gather' (flashdreams doctor lists what works here)"
        )
    return error


def _backend(asked: str, device: str, dtype: torch.dtype, block_q: int, block_k: int, head_dim: int, grad: bool) -> str:
    """The backend to use; plain enough for a compiler to trace, which prints no notices."""
    use = Use(device, dtype, block_q, block_k, head_dim, grad)
    if asked == "auto":
        name, notice = choose(use)
        if not torch.compiler.is_compiling():
            say_once(notice)
        return name
    if asked not in BLOCK_SPARSE_BACKENDS:
        raise ValueError(f"no block-sparse backend {asked!r}; there are auto, {', '.join(BLOCK_SPARSE_BACKENDS)}")
    if needed := lacks(asked, use):
        raise ValueError(f"block-sparse backend {asked!r} needs {needed}; use 'auto' to get one that works here")
    return asked


def _check(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, block_q: int, block_k: int) -> None:
    (batch, length, heads, dim), keys = q.shape, k.shape[1]
    if k.shape != (batch, keys, heads, dim) or v.shape != k.shape:
        raise ValueError(
            f"q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} do not fit: "
            "expected q [B, L, H, D] and k, v [B, S, H, D]"
        )
    rows, columns = math.ceil(length / block_q), math.ceil(keys / block_k)
    if mask.dtype != torch.bool:
        raise ValueError(f"the block mask is {mask.dtype}; expected torch.bool, True where a block may be attended to")
    shapes = [[b, h, rows, columns] for b in {1, batch} for h in {1, heads}]
    if list(mask.shape) not in shapes:
        raise ValueError(
            f"the block mask is {list(mask.shape)}; expected [{batch} or 1, {heads} or 1, {rows}, {columns}] for "
            f"{length} queries in blocks of {block_q} and {keys} keys in blocks of {block_k}"
        )
