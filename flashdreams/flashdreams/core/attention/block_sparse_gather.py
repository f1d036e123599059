"""The ``gather`` backend of block-sparse attention: exact, without a kernel of its own, on any device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def gather(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, blocks: tuple[int, int], scale: float) -> Tensor:
    """Ordinary attention of one block of queries at a time over a copy of its selected keys.

    Work and memory follow the number of selected blocks. On a CPU one row is work enough to make a loop cheap.
    """
    trained = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if torch.compiler.is_compiling() and not trained:
        return _gather_whole(q, k, v, mask, *blocks, scale)
    return _gather(q, k, v, mask, *blocks, scale)


def _gather(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, block_q: int, block_k: int, scale: float) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    block_of = torch.arange(k.shape[2], device=k.device) // block_k

    def row(query: Tensor, key: Tensor, value: Tensor, selected: Tensor) -> Tensor:
        tokens = selected[block_of].nonzero().squeeze(1)
        if not len(tokens):
            return torch.zeros_like(query)
        if len(tokens) < key.shape[2]:
            key, value = key.index_select(2, tokens), value.index_select(2, tokens)
        return F.scaled_dot_product_attention(query, key, value, scale=scale)

    def matching(x: Tensor, b: int, h: int) -> Tensor:
        x = x[b : b + 1] if mask.shape[0] > 1 else x
        return x[:, h : h + 1] if mask.shape[1] > 1 else x

    samples = []
    for b in range(mask.shape[0]):
        heads = []
        for h in range(mask.shape[1]):
            queries, key, value = (matching(x, b, h) for x in (q, k, v))
            rows = zip(queries.split(block_q, 2), mask[b, h], strict=True)
            heads.append(torch.cat([row(query, key, value, selected) for query, selected in rows], 2))
        samples.append(torch.cat(heads, 1))
    return torch.cat(samples).transpose(1, 2).contiguous()


_gather_whole = torch.library.custom_op("flashdreams::block_sparse_gather", _gather, mutates_args=())
"""The loop as one operation to a compiler, which would otherwise trace it anew for every mask. It has no backward."""
_gather_whole.register_fake(lambda q, k, v, mask, block_q, block_k, scale: q.new_empty(q.shape))
