"""What a Wan network makes of a timestep: vectors that shift, scale and gate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FEW = 64
"""Timesteps of a pass up to which the vectors of all blocks are made at once; one per token would fill the memory."""


@dataclass(frozen=True)
class Modulation:
    """A table over distinct timesteps: ``table`` ``[U, ..., D]`` in float32 and ``index`` ``[B, F]`` into it.

    ``F`` is 1 (one timestep per sample), the number of frames, or the number of tokens.
    """

    table: Tensor
    index: Tensor

    def chunks(self, offset: Tensor) -> tuple[Tensor, ...]:
        """Per-position vectors ``[B, F, 1, D]`` of each of the table's entries, ``offset`` ``[1, N, D]`` added."""
        table = self.table + offset.to(self.table.dtype)
        return tuple(entry[self.index].unsqueeze(2) for entry in table.unbind(1))

    def beside(self, other: Modulation) -> Modulation:
        """Of two runs of tokens with as many positions each, this one first: ``[B, 2 F]`` positions."""
        if self.index.shape != other.index.shape:
            raise ValueError(
                f"positions {list(self.index.shape)} and {list(other.index.shape)} differ; expected as many"
            )
        index = torch.cat((self.index, other.index + len(self.table)), dim=1)
        return Modulation(torch.cat((self.table, other.table)), index)

    def stacked(self, offsets: Sequence[Tensor]) -> Tensor:
        """The same for many offsets, as one tensor ``[len(offsets), N, B, F, 1, D]``."""
        table = self.table + torch.stack(list(offsets)).to(self.table.dtype)
        return table[:, self.index].movedim(3, 1).unsqueeze(4)


@dataclass(frozen=True)
class Times:
    """All that a network makes of a timestep alone: its embedding, and the vectors of its blocks and its head.

    ``blocks`` ``[num_blocks, 6, B, F, 1, D]`` and ``head`` ``[2, B, F, 1, D]``; where timesteps are many, the
    :class:`Modulation` they are made of.
    """

    time: Modulation
    blocks: Tensor | Modulation
    head: Tensor | Modulation

    def beside(self, other: Times) -> Times:
        """Of two runs of tokens, as :meth:`Modulation.beside`."""
        return Times(self.time.beside(other.time), _beside(self.blocks, other.blocks), _beside(self.head, other.head))

    def vectors(self, number: int, offset: Tensor) -> tuple[Tensor, ...]:
        """Of block ``number``, whose own modulation is ``offset`` ``[1, 6, D]``."""
        return self.blocks.chunks(offset) if isinstance(self.blocks, Modulation) else self.blocks[number].unbind(0)

    def head_vectors(self, offset: Tensor) -> tuple[Tensor, ...]:
        """Of the head, whose own modulation is ``offset`` ``[1, 2, D]``."""
        return self.head.chunks(offset) if isinstance(self.head, Modulation) else self.head.unbind(0)


def _beside(first: Tensor | Modulation, second: Tensor | Modulation) -> Tensor | Modulation:
    if isinstance(first, Modulation) and isinstance(second, Modulation):
        return first.beside(second)
    assert isinstance(first, Tensor)
    assert isinstance(second, Tensor)
    return torch.cat((first, second), dim=-3)
