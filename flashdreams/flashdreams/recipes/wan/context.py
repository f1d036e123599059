"""What a pass over a chunk is given beside weights: the rollout's caches, and the geometry of the chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashdreams.core.kv_cache import RollingKVCache
from flashdreams.core.rope import Rope


@dataclass
class BlockCache:
    """What one block keeps for one rollout: keys and values of the text and of given images, and the rolling
    self-attention cache.

    ``self_kv`` is ``None`` for bidirectional models, whose only chunk attends to itself. ``state`` is what else a
    subclass' block keeps (:meth:`WanBlock.initialize_state`).
    """

    text_k: Tensor
    text_v: Tensor
    self_kv: RollingKVCache | None = None
    image_k: Tensor | None = None
    image_v: Tensor | None = None
    state: Any = None


@dataclass
class NetworkCache:
    """One guidance branch (or several, stacked on the batch axis) of one rollout."""

    blocks: list[BlockCache]


@dataclass(frozen=True)
class ChunkContext:
    """Geometry of the current chunk, the same for every block and every pass.

    ``start`` is its first latent frame, ``shape`` its frames, rows and columns in tokens. ``rope`` covers the chunk's
    tokens. ``slots`` (int64 ``[L]``) are their places in the rolling cache, ``visible`` is the number of cache tokens
    to read, ``sink_tokens`` how many of the chunk's tokens lie in a raw-kept sink.
    ``read`` (int64) names the cache tokens to read where that is not all of the first ``visible`` (recaching).
    ``mask`` restricts attention within the chunk where there is no rolling cache (training). ``place`` is what a
    subclass of the network makes of all this (:meth:`WanNetwork.place`).
    """

    rope: Rope
    slots: Tensor | None = None
    visible: int = 0
    sink_tokens: int = 0
    read: Tensor | None = None
    mask: Tensor | None = None
    start: int = 0
    shape: tuple[int, int, int] = (0, 0, 0)
    place: Any = None


@dataclass(frozen=True)
class ChunkPair:
    """Two chunks of one length in one pass, the tokens of ``first`` before those of ``second``.

    Each sees what it would see in a pass of its own, had that of the first been done before: ``first`` is a commit.
    ``rope`` covers the tokens of both.
    """

    first: ChunkContext
    second: ChunkContext
    rope: Rope

    @classmethod
    def of(cls, first: ChunkContext, second: ChunkContext) -> ChunkPair:
        cos, sin = (
            torch.cat(parts) for parts in zip(*((c.rope.cos, c.rope.sin) for c in (first, second)), strict=True)
        )
        return cls(first, second, Rope(cos, sin))


class ChunkPass(NamedTuple):
    """What the network is given of one chunk: its ``forward`` says what each is."""

    latent: Tensor
    timestep: Any
    context: ChunkContext
    input: Any = None
