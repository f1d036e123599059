"""The rolling KV cache in one byte a number: an approximation that halves what a rollout keeps in bfloat16."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashdreams.core.kv_cache import CacheGeometry, RollingKVCache
from flashdreams.core.rope import Rope, apply_rope
from flashdreams.infra.errors import UserError

STORAGE = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def encode(x: Tensor, storage: torch.dtype) -> tuple[Tensor, Tensor]:
    """``x`` ``[..., head_dim]`` as codes, and a scale ``[..., 1]`` in bfloat16 for each token and head."""
    wide = x.float()
    scale = (wide.abs().amax(-1, keepdim=True) / LARGEST[storage]).to(torch.bfloat16)
    ratio = wide / scale.float().clamp_min(torch.finfo(torch.bfloat16).tiny)
    ratio = ratio.clamp(-LARGEST[storage], LARGEST[storage])  # a scale that was rounded down would push it beyond
    return (ratio.round() if storage is torch.int8 else ratio).to(storage), scale


def decode(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """What :func:`encode` stood for."""
    return codes.to(dtype) * scale.to(dtype)


class QuantizedKVCache(RollingKVCache):
    """A rolling cache that stores codes. The slots are the same, and what is read is made anew, a layer at a time.

    Raw sink keys are stored likewise, and are rounded a second time when they are rotated; their error does not grow.

    Args:
        dtype: of what is read.
        storage: of the codes.
    """

    def __init__(
        self,
        geometry: CacheGeometry,
        batch: int,
        heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        storage: torch.dtype,
    ) -> None:
        super().__init__(geometry, batch, heads, head_dim, storage, device)
        self.dtype = dtype
        self.k_scale = torch.zeros(*self.k.shape[:-1], 1, dtype=torch.bfloat16, device=device)
        self.v_scale = torch.zeros_like(self.k_scale)
        self.raw_scale = self.k_scale[:, : self.sink_tokens].clone() if geometry.relative else None

    def write(self, k: Tensor, v: Tensor, slots: Tensor) -> None:
        _store(k, self.k, self.k_scale, slots)
        _store(v, self.v, self.v_scale, slots)

    def write_raw_sink(self, raw_k: Tensor, slots: Tensor, count: int) -> None:
        if self.raw_sink is not None and self.raw_scale is not None:
            _store(raw_k[:, :count], self.raw_sink, self.raw_scale, slots[:count])

    def rotate_sink(self, rope: Rope, count: int) -> None:
        if self.raw_sink is not None and self.raw_scale is not None and count:
            raw = decode(self.raw_sink[:, :count], self.raw_scale[:, :count], self.dtype)
            codes, scale = encode(apply_rope(raw, rope[:count]), self.k.dtype)
            self.k[:, :count], self.k_scale[:, :count] = codes, scale

    def read(self, tokens: int) -> tuple[Tensor, Tensor]:
        """The first ``tokens`` slots, as copies."""
        return (
            decode(self.k[:, :tokens], self.k_scale[:, :tokens], self.dtype),
            decode(self.v[:, :tokens], self.v_scale[:, :tokens], self.dtype),
        )

    def gather(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        k, v = (_bytes(codes)[:, slots].view(codes.dtype) for codes in (self.k, self.v))
        return decode(k, self.k_scale[:, slots], self.dtype), decode(v, self.v_scale[:, slots], self.dtype)


def store_kv_as(transformers: Iterable[Any], kv_dtype: str) -> None:
    """Rollouts that start from now on keep their rolling caches as ``kv_dtype``: ``int8`` or ``fp8``.

    Raises:
        UserError: a transformer keeps none.
    """
    for transformer in transformers:
        if transformer.config.bidirectional:
            raise UserError("this model makes a clip as one chunk and keeps no keys and values; leave kv_dtype out")
        transformer.kv_cache = partial(QuantizedKVCache, storage=STORAGE[kv_dtype])


def _store(x: Tensor, codes: Tensor, scales: Tensor, slots: Tensor) -> None:
    new, scale = encode(x, codes.dtype)
    _bytes(codes).index_copy_(1, slots, _bytes(new))
    scales.index_copy_(1, slots, scale)


def _bytes(codes: Tensor) -> Tensor:
    """As integers: not every operation is there for fp8."""
    return codes.view(torch.int8)
