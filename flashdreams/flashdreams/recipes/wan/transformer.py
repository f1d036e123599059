"""The Wan DiT as an autoregressive transformer: guidance, rolling cache and chunk geometry around the network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from flashdreams.core.attention import check_backend
from flashdreams.core.kv_cache import CacheGeometry, RollingKVCache
from flashdreams.core.rope import Rope, rope_3d
from flashdreams.infra.layout import Layout
from flashdreams.infra.transformer import Transformer
from flashdreams.recipes.wan.config import WanTransformerConfig
from flashdreams.recipes.wan.keymaps import DIT_FROM_DIFFUSERS, DIT_FROM_FASTVIDEO
from flashdreams.recipes.wan.network import ChunkContext, NetworkCache, WanNetwork


@dataclass(frozen=True)
class WanConditions:
    """What a rollout is told once: text embeddings ``[B, S, text_dim]``, and those of the negative prompt."""

    text: Tensor
    negative_text: Tensor | None = None

    def __post_init__(self) -> None:
        for name, value in self.to_dict().items():
            if value.ndim != 3 or value.shape[0] != self.text.shape[0]:
                raise ValueError(f"condition {name!r} has shape {list(value.shape)}; expected [batch, tokens, width]")

    def to_dict(self) -> dict[str, Tensor]:
        """The filled slots by name."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}

    @classmethod
    def from_dict(cls, slots: dict[str, Tensor]) -> WanConditions:
        """Inverse of :meth:`to_dict`."""
        unknown = slots.keys() - {f.name for f in fields(cls)}
        if unknown or "text" not in slots:
            raise ValueError(f"condition slots are {sorted(slots)}; expected 'text' and optionally 'negative_text'")
        return cls(**slots)


@dataclass
class TransformerCache:
    """One rollout's context.

    ``branches`` are the guidance branches: conditional and unconditional, one of them, or both stacked on the batch
    axis. ``start`` is the number of committed latent frames; ``chunk`` the geometry of the current chunk, derived.
    """

    layout: Layout
    conditions: WanConditions
    branches: list[NetworkCache]
    start: int = 0
    chunk: ChunkContext | None = None


class WanTransformer(Transformer):
    """Autoregressive Wan: chunks of latent frames over a rolling window, or one bidirectional chunk."""

    config: WanTransformerConfig
    conditions_type = WanConditions
    layouts: ClassVar = {"diffusers": DIT_FROM_DIFFUSERS, "fastvideo": DIT_FROM_FASTVIDEO}

    def __init__(self, config: WanTransformerConfig) -> None:
        super().__init__(config)
        check_backend(config.network.attention)
        self.network: WanNetwork = config.network.setup()

    @property
    def checkpoint_root(self) -> WanNetwork:
        """A checkpoint holds the network's own keys."""
        return self.network

    @property
    def latent_channels(self) -> int:
        return self.config.network.out_dim

    def initialize_cache(self, layout: Layout, conditions: WanConditions) -> TransformerCache:
        cache = TransformerCache(layout, conditions, [])
        cache.branches = [NetworkCache(self.network.encode_text(text)) for text in self._branch_texts(conditions)]
        if self.config.window_size_t is not None:
            for branch in cache.branches:
                for block in branch.blocks:
                    block.self_kv = self._empty_kv(layout, batch=block.text_k.shape[0])
        return cache

    def set_conditions(self, cache: TransformerCache, conditions: WanConditions) -> None:
        texts = self._branch_texts(conditions)
        for branch, text in zip(cache.branches, texts, strict=True):
            for block, fresh in zip(branch.blocks, self.network.encode_text(text), strict=True):
                block.text_k, block.text_v = fresh.text_k, fresh.text_v
        cache.conditions = conditions

    def predict_flow(self, noisy: Tensor, timestep: Tensor, cache: TransformerCache, input: Any = None) -> Tensor:
        flows = self._forward(noisy, timestep, cache, input)
        if len(flows) == 1:
            return flows[0]
        conditional, unconditional = flows
        return unconditional + self.config.guidance_scale * (conditional - unconditional)

    def commit(self, clean: Tensor, timestep: Tensor, cache: TransformerCache, input: Any = None) -> None:
        if self.config.window_size_t is not None:
            self._forward(clean, timestep, cache, input)
        cache.start += clean.shape[2]
        cache.chunk = None

    def _forward(self, latent: Tensor, timestep: Tensor, cache: TransformerCache, input: Any) -> list[Tensor]:
        """One pass per branch; flows ``[B, C, T, H, W]``, conditional first, in the latent's dtype."""
        context = self._context(cache, latent)
        batch, flows = latent.shape[0], []
        for branch in cache.branches:
            copies = branch.blocks[0].text_k.shape[0] // batch
            flow = self.network(
                _repeat(latent, copies), _repeat(timestep, copies), context, branch, _repeat(input, copies)
            )
            flows += flow.to(latent.dtype).chunk(copies)
        return flows

    def _context(self, cache: TransformerCache, latent: Tensor) -> ChunkContext:
        """Geometry of the chunk at ``cache.start``, made on its first pass and shared by the rest."""
        frames = latent.shape[2]
        if cache.chunk is not None and len(cache.chunk.rope.cos) == frames * self._tokens(cache.layout):
            return cache.chunk
        start, stop = cache.start, cache.start + frames
        rope = self._rope(range(start, stop), cache.layout, latent)
        window = self.config.window_size_t
        if window is None:
            if start:
                raise ValueError("this model has no rolling window and makes a single chunk; set window_size_t")
            cache.chunk = ChunkContext(rope)
            return cache.chunk
        geometry = self._geometry(cache.layout)
        cache.chunk = ChunkContext(
            rope,
            geometry.token_slots(start, stop).to(latent.device),
            geometry.visible(stop) * geometry.tokens_per_frame,
            max(0, min(stop, geometry.sink) - start) * geometry.tokens_per_frame if geometry.relative else 0,
        )
        if geometry.relative and stop > window:
            sink_rope = self._rope(geometry.sink_positions(stop), cache.layout, latent)
            for branch in cache.branches:
                for block in branch.blocks:
                    assert block.self_kv is not None
                    block.self_kv.rotate_sink(sink_rope, min(start, geometry.sink) * geometry.tokens_per_frame)
        return cache.chunk

    def _rope(self, frames: range, layout: Layout, like: Tensor) -> Rope:
        network = self.config.network
        rows, columns = layout.height // network.patch_size[1], layout.width // network.patch_size[2]
        dtype = torch.promote_types(like.dtype, torch.float32)
        return rope_3d(frames, rows, columns, network.head_dim, network.rope_theta, dtype).to(like.device)

    def _tokens(self, layout: Layout) -> int:
        """Tokens of one latent frame."""
        _, ph, pw = self.config.network.patch_size
        return (layout.height // ph) * (layout.width // pw)

    def _geometry(self, layout: Layout) -> CacheGeometry:
        config = self.config
        assert config.window_size_t is not None
        relative = config.rope == "cache_relative"
        return CacheGeometry(config.window_size_t, config.sink_size_t, self._tokens(layout), relative)

    def _empty_kv(self, layout: Layout, batch: int) -> RollingKVCache:
        weight = self.network.patch_embedding.weight
        network = self.config.network
        geometry = self._geometry(layout)
        return RollingKVCache(geometry, batch, network.num_heads, network.head_dim, weight.dtype, weight.device)

    def _branch_texts(self, conditions: WanConditions) -> list[Tensor]:
        """Text of each guidance branch: one branch at scale 0 or 1, else two, or both stacked."""
        scale = self.config.guidance_scale
        if scale == 1:
            return [conditions.text]
        if conditions.negative_text is None:
            raise ValueError(f"guidance_scale is {scale}, which needs a negative prompt; none was encoded")
        if scale == 0:
            return [conditions.negative_text]
        both = [conditions.text, conditions.negative_text]
        if self.config.cfg == "sequential":
            return both
        longest = max(text.shape[1] for text in both)
        return [torch.cat([torch.nn.functional.pad(text, (0, 0, 0, longest - text.shape[1])) for text in both])]


def _repeat(value: Any, copies: int) -> Any:
    """``value``, a tree with the batch on axis 0 of each tensor, stacked ``copies`` times."""
    if copies == 1 or value is None:
        return value
    return _map(value, lambda tensor: torch.cat([tensor] * copies))


def _map(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: _map(item, function) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_map(item, function) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _map(getattr(value, f.name), function) for f in fields(value)})
    return value
