"""The two attentions of a Wan block: to the rolling cache, and to the text and the tokens of given images."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flashdreams.core.attention import attention, by_head
from flashdreams.core.kv_cache import RollingKVCache
from flashdreams.core.rope import apply_rope
from flashdreams.recipes.wan.config import WanNetworkConfig
from flashdreams.recipes.wan.context import BlockCache, ChunkContext, ChunkPair
from flashdreams.recipes.wan.layers import RMSNorm


class _Projections(nn.Module):
    """What both have: linear layers, and norms of queries and keys over the full width."""

    def __init__(self, config: WanNetworkConfig) -> None:
        super().__init__()
        self.heads = config.num_heads
        self.backend = config.attention
        self.q = nn.Linear(config.dim, config.dim)
        self.k = nn.Linear(config.dim, config.dim)
        self.v = nn.Linear(config.dim, config.dim)
        self.o = nn.Linear(config.dim, config.dim)
        self.norm_q = RMSNorm(config.dim, config.eps)
        self.norm_k = RMSNorm(config.dim, config.eps)


class SelfAttention(_Projections):
    """Self-attention with rotary positions, over the rolling cache or the chunk alone."""

    def forward(self, x: Tensor, context: ChunkContext | ChunkPair, cache: RollingKVCache | None) -> Tensor:
        q = self.norm_q(self.q(x)).unflatten(-1, (self.heads, -1))
        raw_k = self.norm_k(self.k(x)).unflatten(-1, (self.heads, -1))
        v = self.v(x).unflatten(-1, (self.heads, -1))
        q, k = apply_rope(q, context.rope), apply_rope(raw_k, context.rope)
        if isinstance(context, ChunkContext):
            y = self._attend(q, k, raw_k, v, context, cache)
        else:  # one after the other: what the second writes may take the place of what the first still reads
            first, second = zip(*(part.chunk(2, dim=1) for part in (q, k, raw_k, v)), strict=True)
            y = self._attend(*first, context.first, cache), self._attend(*second, context.second, cache)
            y = torch.cat(y, dim=1)
        return self.o(y.flatten(-2))

    def _attend(
        self, q: Tensor, k: Tensor, raw_k: Tensor, v: Tensor, context: ChunkContext, cache: RollingKVCache | None
    ) -> Tensor:
        """Write the chunk into ``cache`` and attend to what it sees of it, or to itself where there is none."""
        if cache is not None and context.slots is not None:
            if context.sink_tokens:
                cache.write_raw_sink(raw_k, context.slots, context.sink_tokens)
            cache.write(k, v, context.slots)
            k, v = cache.read(context.visible) if context.read is None else cache.gather(context.read)
        return attention(q, k, v, mask=context.mask, backend=self.backend)

    def remember(self, x: Tensor, context: ChunkContext, cache: RollingKVCache) -> None:
        """Write keys and values of ``x`` into ``cache``, as :meth:`forward` does."""
        assert context.slots is not None
        raw_k = self.norm_k(self.k(x)).unflatten(-1, (self.heads, -1))
        v = self.v(x).unflatten(-1, (self.heads, -1))
        if context.sink_tokens:
            cache.write_raw_sink(raw_k, context.slots, context.sink_tokens)
        cache.write(apply_rope(raw_k, context.rope), v, context.slots)


class CrossAttention(_Projections):
    """Attention to the text, and beside it to the tokens of given images where the model has an image branch. Keys and
    values are computed once per prompt and image, by :meth:`encode` and :meth:`encode_image`."""

    def __init__(self, config: WanNetworkConfig) -> None:
        super().__init__(config)
        if config.image_dim is not None and config.text_dim is not None:
            self.k_img = nn.Linear(config.dim, config.dim)
            self.v_img = nn.Linear(config.dim, config.dim)
            self.norm_k_img = RMSNorm(config.dim, config.eps)

    def encode(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values ``[B, S, heads, head_dim]`` of embedded text ``[B, S, dim]``."""
        return self._by_head(self.norm_k(self.k(text))), self._by_head(self.v(text))

    def encode_image(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values ``[B, S, heads, head_dim]`` of embedded image tokens ``[B, S, dim]``."""
        return self._by_head(self.norm_k_img(self.k_img(image))), self._by_head(self.v_img(image))

    def _by_head(self, x: Tensor) -> Tensor:
        return by_head(x.unflatten(-1, (self.heads, -1)))

    def forward(self, x: Tensor, cache: BlockCache) -> Tensor:
        q = self.norm_q(self.q(x)).unflatten(-1, (self.heads, -1))
        y = attention(q, cache.text_k, cache.text_v, backend=self.backend)
        if cache.image_k is not None and cache.image_v is not None:
            y = y + attention(q, cache.image_k, cache.image_v, backend=self.backend)
        return self.o(y.flatten(-2))
