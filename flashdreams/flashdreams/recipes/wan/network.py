"""The Wan DiT, with the key names of the published checkpoints (Wan2.1 ``wan/modules/model.py``).

Plain PyTorch: it knows nothing of compile, graphs, quantization or parallelism. What belongs to one rollout comes in
as values: text keys and rolling caches (:class:`NetworkCache`), and the geometry of the chunk (:class:`ChunkContext`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from flashdreams.core.kv_cache import CacheGeometry
from flashdreams.recipes.wan.attention import CrossAttention, SelfAttention
from flashdreams.recipes.wan.config import WanNetworkConfig
from flashdreams.recipes.wan.context import BlockCache, ChunkContext, ChunkPair, ChunkPass, NetworkCache
from flashdreams.recipes.wan.layers import (
    ImageEmbedding,
    TanhGELU,
    at_least_float32,
    gated_add,
    layer_norm,
    modulate,
    sinusoid,
    wide_linear,
)
from flashdreams.recipes.wan.modulation import FEW, Modulation, Times


class WanBlock(nn.Module):
    """Self-attention, text cross-attention and feed-forward, modulated by the timestep.

    Conditioners (camera, actions) enter the published models after the one attention or the other: subclasses override
    :meth:`after_self_attention` and :meth:`after_cross_attention`.
    """

    def __init__(self, config: WanNetworkConfig) -> None:
        super().__init__()
        self.eps = config.eps
        self.self_attn = SelfAttention(config)
        self.cross_attn = CrossAttention(config)
        self.norm3 = nn.LayerNorm(config.dim, config.eps)
        self.ffn = nn.Sequential(
            nn.Linear(config.dim, config.ffn_dim), TanhGELU(), nn.Linear(config.ffn_dim, config.dim)
        )
        self.modulation = nn.Parameter(torch.randn(1, 6, config.dim) / math.sqrt(config.dim))

    def initialize_state(
        self, geometry: CacheGeometry | None, batch: int, dtype: torch.dtype, device: torch.device
    ) -> Any:
        """What this block keeps for one rollout beside its keys and values (``BlockCache.state``).

        Every pass over a chunk may write what belongs to that chunk, and nothing else: passes are repeated.

        Args:
            geometry: of the rolling cache; ``None`` for bidirectional models.
            batch: guidance branches included.
        """
        return None

    def after_self_attention(self, x: Tensor, input: Any, cache: BlockCache, context: ChunkContext) -> Tensor:
        """Hook for conditioners: ``x`` ``[B, L, dim]``, returned changed or as it is; ``input`` is this block's."""
        return x

    def after_cross_attention(self, x: Tensor, input: Any, cache: BlockCache, context: ChunkContext) -> Tensor:
        """Hook for conditioners, as :meth:`after_self_attention`."""
        return x

    def forward(
        self,
        x: Tensor,
        vectors: Sequence[Tensor],
        context: ChunkContext | ChunkPair,
        cache: BlockCache,
        input: Any = None,
    ) -> Tensor:
        """``x`` ``[B, L, dim]`` -> the same shape.

        Args:
            vectors: shift, scale and gate of self-attention, and of the feed-forward, ``[B, F, 1, dim]`` each.
            input: the block's; of two chunks, both.
        """
        shift_sa, scale_sa, gate_sa, shift_ff, scale_ff, gate_ff = vectors
        y = self.self_attn(modulate(x, shift_sa, scale_sa, self.eps), context, cache.self_kv)
        x = gated_add(x, y, gate_sa)
        x = self._hook("after_self_attention", x, input, cache, context)
        x = x + self.cross_attn(layer_norm(x, self.norm3), cache)
        x = self._hook("after_cross_attention", x, input, cache, context)
        return gated_add(x, self.ffn(modulate(x, shift_ff, scale_ff, self.eps)), gate_ff)

    def _hook(self, name: str, x: Tensor, input: Any, cache: BlockCache, context: ChunkContext | ChunkPair) -> Tensor:
        """What the hook of that name makes of ``x``, of each chunk by itself."""
        hook = getattr(self, name)
        if isinstance(context, ChunkContext):
            return hook(x, input, cache, context)
        if getattr(type(self), name) is getattr(WanBlock, name):
            return x
        (first, second), contexts = x.chunk(2, dim=1), (context.first, context.second)
        first = hook(first, input[0], cache, contexts[0])
        return torch.cat((first, hook(second, input[1], cache, contexts[1])), dim=1)

    def remember(
        self, x: Tensor, vectors: Sequence[Tensor], context: ChunkContext, cache: BlockCache, input: Any = None
    ) -> None:
        """Write what the context keeps of the chunk, as :meth:`forward` does, and compute nothing else: for the last
        block of a commit, whose output nobody reads."""
        if type(self).initialize_state is not WanBlock.initialize_state or cache.self_kv is None:
            self(x, vectors, context, cache, input)  # what a subclass keeps may come from anywhere in the block
            return
        self.self_attn.remember(modulate(x, vectors[0], vectors[1], self.eps), context, cache.self_kv)


class Head(nn.Module):
    """Final modulated projection to ``patch_volume * out_dim``."""

    def __init__(self, config: WanNetworkConfig) -> None:
        super().__init__()
        self.eps = config.eps
        self.head = nn.Linear(config.dim, math.prod(config.patch_size) * config.out_dim)
        self.modulation = nn.Parameter(torch.randn(1, 2, config.dim) / math.sqrt(config.dim))

    def forward(self, x: Tensor, vectors: Sequence[Tensor]) -> Tensor:
        """``[B, L, dim] -> [B, L, patch_volume * out_dim]``; ``vectors`` are shift and scale, ``[B, F, 1, dim]``."""
        shift, scale = vectors
        return self.head(modulate(x, shift, scale, self.eps))


class WanNetwork(nn.Module):
    """Predicts the flow ``noise - clean`` of one chunk.

    Subclasses add controls: :meth:`prepare` once per chunk, then in every pass :meth:`pass_input`, :meth:`condition` at
    the input, and :meth:`block_input` for the blocks, which :meth:`make_block` builds.
    """

    frame_by_frame: ClassVar[bool] = True
    """Whether controls, ``[B, T, ...]``, act on the tokens of their own latent frame alone, so that many chunks may
    stand in one pass (``packed``). A subclass says so itself, or it is not assumed."""

    def __init__(self, config: WanNetworkConfig) -> None:
        super().__init__()
        self.config = config
        dim = config.dim
        self.patch_embedding = nn.Conv3d(config.in_dim, dim, config.patch_size, config.patch_size)
        if config.text_dim is not None:
            self.text_embedding = nn.Sequential(nn.Linear(config.text_dim, dim), nn.GELU("tanh"), nn.Linear(dim, dim))
        if config.image_dim is not None:
            self.img_emb = ImageEmbedding(config)
        self.time_embedding = nn.Sequential(nn.Linear(config.freq_dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.time_projection = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))
        self.blocks = nn.ModuleList(self.make_block(index) for index in range(config.num_layers))
        self.head = Head(config)

    def make_block(self, index: int) -> WanBlock:
        """Block ``index``, called while the network is built."""
        return WanBlock(self.config)

    def encode_text(self, text: Tensor | None, image: Tensor | None = None) -> list[BlockCache]:
        """Keys and values of every block, of the text and of image tokens.

        Args:
            text: ``[B, S, text_dim]`` with ``S <= text_len``; zero-padded to ``text_len`` before the projection, and
                the padding is attended, as published. ``None`` for a network without text.
            image: ``[B, image_tokens, image_dim]``, for a network with an image branch, which runs without them too;
                a network without text has them in the text's place.
        """
        blocks: list[Any] = list(self.blocks)
        if text is None:
            tokens = self._embed_image(image)
            return [BlockCache(*block.cross_attn.encode(tokens)) for block in blocks]
        if text.shape[1] > self.config.text_len:
            raise ValueError(f"text has {text.shape[1]} tokens; this network takes {self.config.text_len}")
        text = F.pad(text, (0, 0, 0, self.config.text_len - text.shape[1]))
        dtype = self.patch_embedding.weight.dtype
        embedded = self.text_embedding(text.to(dtype))
        if image is None:
            return [BlockCache(*block.cross_attn.encode(embedded)) for block in blocks]
        tokens = self._embed_image(image)
        return [BlockCache(*b.cross_attn.encode(embedded), None, *b.cross_attn.encode_image(tokens)) for b in blocks]

    def _embed_image(self, image: Tensor | None) -> Tensor:
        """``[B, image_tokens, image_dim] -> [B, image_tokens, dim]``."""
        width = self.config.image_dim
        if image is None or width is None or image.shape[1:] != (self.config.image_tokens, width):
            got = None if image is None else list(image.shape[1:])
            expected = None if width is None else [self.config.image_tokens, width]
            raise ValueError(f"image tokens are {got}; this network takes {expected}")
        return self.img_emb(image.to(self.patch_embedding.weight.dtype))

    def prepare(self, input: Any) -> Any:
        """What of a chunk's controls depends on neither noise, time nor text: the ``input`` of every pass over the
        chunk, made once. ``input`` is the streaming encoder's, or ``None``."""
        return input

    def place(self, context: ChunkContext) -> Any:
        """What a subclass needs of the chunk's geometry, made once per chunk (``context.place``). No pass reads
        ``context.start`` itself, which is another number in every chunk."""
        return None

    def pass_input(self, latent: Tensor, context: ChunkContext, cache: NetworkCache, input: Any) -> Any:
        """What one pass hands to :meth:`condition` and :meth:`block_input`; by default what :meth:`prepare` left."""
        return input

    def condition(self, x: Tensor, time: Modulation, input: Any) -> tuple[Tensor, Modulation]:
        """Hook for conditioners at the input: tokens ``x`` ``[B, L, dim]`` and time embedding ``time`` (table
        ``[U, dim]``), returned changed or as they are."""
        return x, time

    def block_input(self, index: int, input: Any) -> Any:
        """What block ``index`` is given of ``input``."""
        return input

    def forward(
        self, latent: Tensor, timestep: Tensor | Times, context: ChunkContext, cache: NetworkCache, input: Any = None
    ) -> Tensor:
        """Flow ``[B, out_dim, T, H, W]`` of ``latent`` ``[B, in_dim, T, H, W]``.

        Args:
            timestep: ``1000 * sigma``, shape ``[B]``, ``[B, T]`` or ``[B, L]`` (``L`` tokens, frame-major); or what
                :meth:`times` made of it.
            input: the chunk's controls, as :meth:`prepare` left them.
        """
        input = self.pass_input(latent, context, cache, input)
        x, times = self._enter(latent, timestep, input)
        blocks: list[Any] = list(self.blocks)
        for i, (block, block_cache) in enumerate(zip(blocks, cache.blocks, strict=True)):
            x = block(x, times.vectors(i, block.modulation), context, block_cache, self.block_input(i, input))
        return self._leave(x, times, latent)

    def _leave(self, x: Tensor, times: Times, latent: Tensor) -> Tensor:
        """Flow of ``latent`` from the tokens after the last block."""
        x = self.head(x, times.head_vectors(self.head.modulation))
        frames, height, width = latent.shape[2:]
        _, ph, pw = self.config.patch_size
        return rearrange(
            x, "b (t h w) (p q c) -> b c t (h p) (w q)", t=frames, h=height // ph, w=width // pw, p=ph, q=pw
        )

    def remember(
        self, latent: Tensor, timestep: Tensor | Times, context: ChunkContext, cache: NetworkCache, input: Any = None
    ) -> None:
        """Write the chunk into ``cache``, as :meth:`forward` does: a commit, whose flow nobody reads."""
        input = self.pass_input(latent, context, cache, input)
        x, times = self._enter(latent, timestep, input)
        blocks: list[Any] = list(self.blocks)
        for i, (block, block_cache) in enumerate(zip(blocks, cache.blocks, strict=True)):
            run = block.remember if i == len(blocks) - 1 else block
            x = run(x, times.vectors(i, block.modulation), context, block_cache, self.block_input(i, input))

    def remember_and_forward(self, clean: ChunkPass, noisy: ChunkPass, cache: NetworkCache) -> Tensor:
        """:meth:`remember` of the chunk ``clean``, then :meth:`forward` of ``noisy``, the next one and as long, in one
        pass: what goes token by token is computed for both at once."""
        inputs = [self.pass_input(each.latent, each.context, cache, each.input) for each in (clean, noisy)]
        entered = [self._enter(*each[:2], input) for each, input in zip((clean, noisy), inputs, strict=True)]
        (first, first_times), (second, second_times) = entered
        x, times = torch.cat((first, second), dim=1), first_times.beside(second_times)
        context, blocks, last = ChunkPair.of(clean.context, noisy.context), list[Any](self.blocks), len(self.blocks) - 1
        for i, (block, block_cache) in enumerate(zip(blocks[:last], cache.blocks[:last], strict=True)):
            input = [self.block_input(i, each) for each in inputs]
            x = block(x, times.vectors(i, block.modulation), context, block_cache, input)
        first, second = x.chunk(2, dim=1)  # what the last block makes of the clean chunk nobody reads
        block, block_cache = blocks[last], cache.blocks[last]
        vectors = [each.vectors(last, block.modulation) for each in (first_times, second_times)]
        block.remember(first, vectors[0], clean.context, block_cache, self.block_input(last, inputs[0]))
        x = block(second, vectors[1], noisy.context, block_cache, self.block_input(last, inputs[1]))
        return self._leave(x, second_times, noisy.latent)

    def _enter(self, latent: Tensor, timestep: Tensor | Times, input: Any) -> tuple[Tensor, Times]:
        """Tokens ``[B, L, dim]`` before the first block, and the vectors of the timestep."""
        dtype = self.patch_embedding.weight.dtype
        x = self.patch_embedding(latent.to(dtype)).flatten(2).transpose(1, 2)
        times = timestep if isinstance(timestep, Times) else self.times(timestep)
        x, time = self.condition(x, times.time, input)
        return x, times if time is times.time else self._times(time)

    def times(self, timestep: Tensor) -> Times:
        """All that the network makes of a timestep alone; good until weights change."""
        return self._times(self.embed_time(timestep))

    def _times(self, time: Modulation) -> Times:
        silu_time = self.time_projection[0](time.table)
        projected = F.linear(silu_time, *wide_linear(self.time_projection[1], silu_time.dtype))
        blocks = Modulation(projected.unflatten(-1, (6, -1)), time.index)
        head = Modulation(time.table.unsqueeze(1).expand(-1, 2, -1), time.index)
        if time.index.numel() > FEW:
            return Times(time, blocks, head)
        modules: list[Any] = list(self.blocks)
        own = [block.modulation for block in modules]
        return Times(time, blocks.stacked(own), head.stacked([self.head.modulation])[0])

    def embed_time(self, timestep: Tensor) -> Modulation:
        """Time embedding, in at least float32, of timesteps ``[B]`` or ``[B, F]``: one row per entry, or per distinct
        entry where there is one timestep per token (few distinct values, many tokens)."""
        if timestep.ndim == 1:
            timestep = timestep[:, None]
        values, index = timestep.flatten(), None
        if values.numel() > 256:
            values, index = torch.unique(values, return_inverse=True)
        else:
            index = torch.arange(values.numel(), device=values.device)
        wide = at_least_float32(self.patch_embedding.weight.dtype)
        x = sinusoid(values, self.config.freq_dim).to(wide)
        x = F.linear(x, *wide_linear(self.time_embedding[0], wide))
        x = F.linear(F.silu(x), *wide_linear(self.time_embedding[2], wide))
        return Modulation(x, index.view(timestep.shape))
