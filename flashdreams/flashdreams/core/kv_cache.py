"""The rolling KV cache: a pinned sink of S frames and a ring of R frames, in buffers that never move.

The slot of absolute latent frame ``f`` is a pure function, ``f`` if ``f < S`` else ``S + (f - S) mod R``.
Attention does not care about the order of keys, so nothing is ever rolled, copied or re-gathered: while the
cache fills, a contiguous prefix is read; afterwards the whole buffer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashdreams.core.rope import Rope, apply_rope


@dataclass(frozen=True)
class CacheGeometry:
    """Window and sink in latent frames, and the tokens of one latent frame."""

    window: int
    sink: int
    tokens_per_frame: int
    relative: bool = False
    """``cache_relative`` RoPE: sink keys are kept raw and re-rotated as the window moves."""

    def __post_init__(self) -> None:
        if not 0 <= self.sink < self.window:
            raise ValueError(f"sink={self.sink}, window={self.window}; expected 0 <= sink < window")

    @property
    def ring(self) -> int:
        return self.window - self.sink

    def slot(self, frame: int) -> int:
        """Slot of absolute latent frame ``frame``, in frames."""
        return frame if frame < self.sink else self.sink + (frame - self.sink) % self.ring

    def visible(self, end: int) -> int:
        """Latent frames readable when the current chunk ends before frame ``end``."""
        return min(end, self.window)

    def token_slots(self, start: int, stop: int) -> Tensor:
        """Token slots of frames ``start..stop-1``, int64 ``[(stop - start) * tokens_per_frame]``."""
        if stop - start > self.ring:
            raise ValueError(f"a chunk of {stop - start} latent frames does not fit a ring of {self.ring}")
        slots = torch.tensor([self.slot(frame) for frame in range(start, stop)])
        return (slots[:, None] * self.tokens_per_frame + torch.arange(self.tokens_per_frame)).flatten()

    def sink_positions(self, end: int) -> range:
        """Positions the sink frames take under ``cache_relative`` when the chunk ends before ``end``."""
        shift = max(0, end - self.window)
        return range(shift, shift + self.sink)


class RollingKVCache:
    """Keys and values of one attention layer, ``[B, window * tokens_per_frame, heads, head_dim]``.

    The buffers ``keys`` and ``values`` are ``[B, heads, tokens, head_dim]``: attention reads each head's tokens in one
    run, and a compiler, which copies a buffer whose dimensions lie in another order, reads it where it is.
    """

    def __init__(
        self,
        geometry: CacheGeometry,
        batch: int,
        heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.geometry = geometry
        tokens = geometry.window * geometry.tokens_per_frame
        shape = batch, heads, tokens, head_dim
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.sink_tokens = geometry.sink * geometry.tokens_per_frame
        self.raw_sink = self.k[:, : self.sink_tokens].clone() if geometry.relative else None

    @property
    def k(self) -> Tensor:
        """Keys ``[B, window * tokens_per_frame, heads, head_dim]``, a view."""
        return self.keys.transpose(1, 2)

    @property
    def v(self) -> Tensor:
        """Values, likewise."""
        return self.values.transpose(1, 2)

    def write(self, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Store rotated keys and values ``[B, L, heads, head_dim]`` at token ``slots`` ``[L]``."""
        self.keys.index_copy_(2, slots, k.transpose(1, 2).to(self.keys.dtype))
        self.values.index_copy_(2, slots, v.transpose(1, 2).to(self.values.dtype))

    def write_raw_sink(self, raw_k: Tensor, slots: Tensor, count: int) -> None:
        """Keep the unrotated keys of the chunk's first ``count`` tokens, which lie in the sink."""
        if self.raw_sink is not None:
            self.raw_sink.index_copy_(1, slots[:count], raw_k[:, :count].to(self.raw_sink.dtype))

    def rotate_sink(self, rope: Rope, count: int) -> None:
        """Rotate the first ``count`` sink keys anew from their raw form; ``rope`` covers all sink tokens."""
        if self.raw_sink is not None and count:
            self.k[:, :count] = apply_rope(self.raw_sink[:, :count], rope[:count])

    def read(self, tokens: int) -> tuple[Tensor, Tensor]:
        """The first ``tokens`` slots, as views."""
        return self.k[:, :tokens], self.v[:, :tokens]

    def gather(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """The token ``slots`` ``[L]`` alone, as copies: for the rare pass that may not see all that is stored."""
        return self.k[:, slots], self.v[:, slots]
