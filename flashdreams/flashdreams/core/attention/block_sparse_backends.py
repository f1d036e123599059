"""Block-sparse attention backends by name.

Each takes ``q [B, L, H, D]``, ``k, v [B, S, H, D]``, a boolean ``mask [B or 1, H or 1, ceil(L / block_q),
ceil(S / block_k)]``, the two block sizes and the scale, and returns ``[B, L, H, D]``: 0 where the mask's row is empty.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from flashdreams.core.attention.block_sparse_gather import gather

BlockSparseBackend = Callable[[Tensor, Tensor, Tensor, Tensor, tuple[int, int], float], Tensor]


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, blocks: tuple[int, int], scale: float) -> Tensor:
    """Masked softmax over all pairs of tokens: the reference, slow and as large as the whole matrix of scores."""
    rows = mask.repeat_interleave(blocks[0], 2)[:, :, : q.shape[1]]
    allowed = rows.repeat_interleave(blocks[1], 3)[..., : k.shape[1]]
    empty = ~rows.any(3, keepdim=True)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = (q @ k.transpose(2, 3) * scale).masked_fill(~allowed, float("-inf")).masked_fill(empty, 0)
    weights = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(v.dtype)
    return (weights @ v).masked_fill(empty, 0).transpose(1, 2)


def flex(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, blocks: tuple[int, int], scale: float) -> Tensor:
    """PyTorch's FlexAttention, compiled: one kernel that reads the selected blocks only."""
    # A model that is being compiled as a whole takes it along.
    attend = flex_attention if torch.compiler.is_compiling() else _compiled_flex()
    return _flex(attend, q, k, v, mask, blocks, scale)


def flex_eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, blocks: tuple[int, int], scale: float) -> Tensor:
    """FlexAttention not compiled (PyTorch warns about it): as slow and large as ``dense``, by another way."""
    return _flex(flex_attention, q, k, v, mask, blocks, scale)


@cache
def _compiled_flex() -> Callable[..., Any]:
    # fullgraph: past the limit of recompilations an error, not a silent return to the eager form.
    return torch.compile(flex_attention, fullgraph=True)


def _flex(
    attend: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, mask: Tensor, blocks: tuple[int, int], scale: float
) -> Tensor:
    per_head = mask.expand(q.shape[0], q.shape[2], -1, -1)

    def allowed(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return per_head[b, h, i // blocks[0], j // blocks[1]]

    # All selected blocks are listed as "full", so a compiled kernel never evaluates `allowed`; the eager form, which
    # does not look at the lists, evaluates nothing else.
    count = mask.sum(-1, dtype=torch.int32)
    order = mask.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    none, nowhere = torch.zeros_like(count), torch.zeros_like(order)
    lengths = q.shape[1], k.shape[1]
    block_mask = BlockMask.from_kv_blocks(none, nowhere, count, order, blocks, allowed, seq_lengths=lengths)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return attend(q, k, v, block_mask=block_mask, scale=scale).transpose(1, 2)


def block_sparse_attn(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, blocks: tuple[int, int], scale: float) -> Tensor:
    """The block-sparse-attn package: CUDA, half precision, blocks of 128.

    No registry has it; it is built from its sources, mit-han-lab/Block-Sparse-Attention.
    """
    from block_sparse_attn import block_sparse_attn_func  # ty: ignore[import-not-found]

    (batch, length, heads, dim), keys = q.shape, k.shape[1]
    ends = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
    out = block_sparse_attn_func(
        q.reshape(-1, heads, dim),
        k.reshape(-1, heads, dim),
        v.reshape(-1, heads, dim),
        ends * length,
        ends * keys,
        torch.ones(heads, dtype=torch.int32, device=q.device),  # every head: block-sparse, the next mask in turn
        None,
        mask.expand(batch, heads, -1, -1).contiguous(),
        length,
        keys,
        0.0,
        deterministic=False,
        softmax_scale=scale,
        is_causal=False,
        exact_streaming=False,
        return_attn_probs=False,
    )
    # What its kernel leaves in a row without blocks is promised nowhere.
    empty = ~mask.any(-1).repeat_interleave(blocks[0], 2)[:, :, :length].transpose(1, 2)
    return out.reshape(q.shape).masked_fill(empty[..., None], 0)


BLOCK_SPARSE_BACKENDS: dict[str, BlockSparseBackend] = {
    "block_sparse_attn": block_sparse_attn,
    "flex": flex,
    "gather": gather,
    "flex_eager": flex_eager,
    "dense": dense,
}
