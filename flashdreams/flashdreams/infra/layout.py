"""Sizes and chunk plan of one rollout, as one value (no torch)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ChunkPlan:
    """How latent frames fall into chunks: the first may be shorter or longer than the rest."""

    len_t: int
    first_len_t: int

    @staticmethod
    def of(len_t: int, first_len_t: int | None = None, given: int = 0) -> ChunkPlan:
        """The plan of a rollout whose first ``given`` latent frames are supplied: they end at a chunk boundary."""
        first = len_t if first_len_t is None else first_len_t
        on_boundary = given == 0 or (given >= first and (given - first) % len_t == 0)
        return ChunkPlan(len_t, first if on_boundary else given % len_t or len_t)

    def span(self, chunk: int) -> tuple[int, int]:
        """Latent frames ``[start, stop)`` of ``chunk``."""
        if chunk < 0:
            raise ValueError(f"chunk {chunk}; expected 0 or more")
        if chunk == 0:
            return 0, self.first_len_t
        start = self.first_len_t + (chunk - 1) * self.len_t
        return start, start + self.len_t

    def frames_until(self, num_chunk: int) -> int:
        """Latent frames of the first ``num_chunk`` chunks."""
        return 0 if num_chunk == 0 else self.span(num_chunk - 1)[1]


@dataclass(frozen=True)
class Layout:
    """Everything about shape that one rollout fixes: batch, latent size and chunk plan."""

    batch: int
    channels: int
    height: int
    """Latent rows."""
    width: int
    """Latent columns."""
    plan: ChunkPlan

    def shape(self, chunk: int) -> tuple[int, int, int, int, int]:
        """Latent shape ``[B, C, T, H, W]`` of ``chunk``."""
        start, stop = self.plan.span(chunk)
        return self.batch, self.channels, stop - start, self.height, self.width
