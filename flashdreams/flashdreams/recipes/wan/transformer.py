"""The Wan DiT as an autoregressive transformer: guidance, rolling cache and chunk geometry around the network."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flashdreams.core.attention import check_backend
from flashdreams.core.kv_cache import CacheGeometry, RollingKVCache
from flashdreams.core.rope import Rope, rope_3d
from flashdreams.infra.layout import Layout
from flashdreams.infra.transformer import Copy, Transformer, check_plain
from flashdreams.recipes.wan.attention import SelfAttention
from flashdreams.recipes.wan.conditions import WanConditions
from flashdreams.recipes.wan.config import WanTransformerConfig
from flashdreams.recipes.wan.context import BlockCache, ChunkContext, ChunkPass, NetworkCache
from flashdreams.recipes.wan.keymaps import DIT_FROM_DIFFUSERS, DIT_FROM_FASTVIDEO
from flashdreams.recipes.wan.modulation import Times
from flashdreams.recipes.wan.network import WanBlock, WanNetwork
from flashdreams.recipes.wan.packed import packed_branches

_DERIVED = {"derived": True}


@dataclass
class TransformerCache:
    """One rollout's context.

    ``branches`` are the guidance branches: conditional and unconditional, one of them, or both stacked on the batch
    axis. ``start`` is the number of committed latent frames. ``chunk`` is the geometry of the current chunk, and
    ``prepared`` its controls and what they alone decide; ``times`` is what the network makes of each timestep. All
    three are derived, made anew when they are missing, and not saved.
    """

    layout: Layout
    conditions: WanConditions
    branches: list[NetworkCache]
    start: int = 0
    chunk: ChunkContext | None = field(default=None, metadata=_DERIVED)
    prepared: tuple[Any, Any] | None = field(default=None, metadata=_DERIVED)
    times: dict[tuple[int, int, bool], tuple[Tensor, Times]] = field(default_factory=dict, metadata=_DERIVED)


class WanTransformer(Transformer):
    """Autoregressive Wan: chunks of latent frames over a rolling window, or one bidirectional chunk."""

    config: WanTransformerConfig
    conditions_type = WanConditions
    lora_targets: ClassVar = (
        *(f"{attention}.{part}" for attention in ("self_attn", "cross_attn") for part in "qkvo"), "ffn.0", "ffn.2",
    )  # fmt: skip
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

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return list(self.network.blocks)

    def initialize_cache(self, layout: Layout, conditions: WanConditions) -> TransformerCache:
        self._check(conditions, layout)
        cache = TransformerCache(layout, conditions, [])
        cache.branches = [NetworkCache(blocks) for blocks in self._encode(conditions)]
        geometry = None if self.config.bidirectional else self._geometry(layout)
        weight = self.network.patch_embedding.weight
        modules: list[Any] = list(self.network.blocks)
        for branch in cache.branches:
            for module, block in zip(modules, branch.blocks, strict=True):
                batch = block.text_k.shape[0]
                if geometry is not None:
                    block.self_kv = self._empty_kv(geometry, batch)
                block.state = module.initialize_state(geometry, batch, weight.dtype, weight.device)
        return cache

    def set_conditions(self, cache: TransformerCache, conditions: WanConditions) -> None:
        self._check(conditions, cache.layout)
        for branch, fresh_blocks in zip(cache.branches, self._encode(conditions), strict=True):
            for block, fresh in zip(branch.blocks, fresh_blocks, strict=True):
                block.text_k, block.text_v = fresh.text_k, fresh.text_v
                block.image_k, block.image_v = fresh.image_k, fresh.image_v
        cache.conditions = conditions
        cache.times.clear()  # weights may have changed with them

    def predict_flow(self, noisy: Tensor, timestep: Tensor, cache: TransformerCache, input: Any = None) -> Tensor:
        return self._guided(self._flows(noisy, timestep, cache, input))

    def predict_flow_packed(
        self,
        clean: Sequence[Tensor],
        copies: Sequence[Copy],
        layout: Layout,
        conditions: WanConditions,
        inputs: Sequence[Any],
        *,
        detached: bool,
    ) -> list[Tensor]:
        branches = packed_branches(self, clean, copies, layout, conditions, inputs, detached=detached)
        return [self._guided(list(flows)) for flows in zip(*branches, strict=True)]

    def _guided(self, flows: list[Tensor]) -> Tensor:
        """The flow that those of the branches, conditional first, come to."""
        if len(flows) == 1:
            return flows[0]
        conditional, unconditional = flows
        return unconditional + self.config.guidance_scale * (conditional - unconditional)

    def commit(self, clean: Tensor, timestep: Tensor, cache: TransformerCache, input: Any = None) -> None:
        if self.config.window_size_t is not None:
            self._remember(clean, timestep, cache, input)
        self.skip(clean.shape[2], cache)

    def skip(self, frames: int, cache: TransformerCache) -> None:
        cache.start += frames
        cache.chunk = cache.prepared = None

    def check_fused_commit(self) -> None:
        check_plain(self, WanTransformer, "predict_flow", "commit")
        check_plain(self.network, WanNetwork, "forward", "remember")
        blocks: list[Any] = list(self.network.blocks)
        for block in blocks:
            check_plain(block, WanBlock, "forward", "remember")
            check_plain(block.self_attn, SelfAttention, "forward", "remember")

    def can_fuse(self, clean: Tensor, frames: int, cache: TransformerCache) -> bool:
        """Chunks of one length, of which no frame stands in the sample as given."""
        return clean.shape[2] == frames and self._stamped(cache, 2 * frames) is None

    def commit_and_predict_flow(
        self,
        clean: Tensor,
        noisy: Tensor,
        timesteps: tuple[Tensor, Tensor],
        cache: TransformerCache,
        inputs: tuple[Any, Any] = (None, None),
    ) -> Tensor:
        committed = list(self._passes(clean, timesteps[0], cache, inputs[0]))
        self.skip(clean.shape[2], cache)
        following = self._passes(noisy, timesteps[1], cache, inputs[1])
        flows: list[Tensor] = []
        for (_, before), (copies, after) in zip(committed, following, strict=True):
            first, second = (ChunkPass(*arguments[:3], arguments[4]) for arguments in (before, after))
            flow = self.network.remember_and_forward(first, second, after[3])
            flows += flow.to(noisy.dtype).chunk(copies)
        return self._guided(flows)

    def recommit(self, chunks: Mapping[int, tuple[Tensor, Any]], timestep: Tensor, cache: TransformerCache) -> None:
        """Chunk by chunk, in order. Each sees what would have been there had the rollout begun with these chunks: later
        frames, whose old keys still lie in the ring, are not read."""
        if self.config.window_size_t is None:
            return
        geometry, end = self._geometry(cache.layout), cache.start
        oldest = min((start for start in chunks if start >= geometry.sink), default=0)
        for start, (latent, input) in sorted(chunks.items()):
            stop = start + latent.shape[2]
            if not self.config.recache_sink and stop <= geometry.sink:
                continue
            cache.start, cache.chunk, cache.prepared = start, None, None
            ring = range(max(start if start < geometry.sink else oldest, stop - geometry.ring), stop)
            frames = sorted({*range(min(stop, geometry.sink)), *(frame for frame in ring if frame >= geometry.sink)})
            slots = torch.cat([geometry.token_slots(frame, frame + 1) for frame in frames])
            cache.chunk = self._placed(replace(self._context(cache, latent), read=slots.to(latent.device)))
            if geometry.relative and start >= geometry.sink:
                self._rotate_sinks(cache, geometry, stop, latent)
            self._remember(latent, timestep, cache, input)
        cache.start, cache.chunk, cache.prepared = end, None, None

    def stamp(self, noisy: Tensor, cache: TransformerCache) -> Tensor:
        known = self._stamped(cache, noisy.shape[2])
        if known is None:
            return noisy
        return torch.cat((known.to(noisy), noisy[:, :, known.shape[2] :]), dim=2)

    def _flows(self, latent: Tensor, timestep: Tensor, cache: TransformerCache, input: Any) -> list[Tensor]:
        """One pass per branch; flows ``[B, C, T, H, W]``, conditional first, in the latent's dtype."""
        passes = self._passes(latent, timestep, cache, input)
        return [
            flow for copies, arguments in passes for flow in self.network(*arguments).to(latent.dtype).chunk(copies)
        ]

    def _remember(self, latent: Tensor, timestep: Tensor, cache: TransformerCache, input: Any) -> None:
        """Write the chunk into every branch's context."""
        for _, arguments in self._passes(latent, timestep, cache, input):
            self.network.remember(*arguments)

    def _passes(
        self, latent: Tensor, timestep: Tensor, cache: TransformerCache, input: Any
    ) -> Iterator[tuple[int, tuple[Any, ...]]]:
        """For each branch: how many are stacked in it, and the network's arguments."""
        context = self._context(cache, latent)
        batch, frames = latent.shape[0], latent.shape[2]
        known = self._stamped(cache, frames)
        if self.config.concat_image_mask_to_latent:
            given = cache.conditions.image_mask, cache.conditions.image_latent
            latent = torch.cat((latent, *(_frames(part, cache.start, frames).to(latent) for part in given)), dim=1)
        input = self._prepared(cache, input)
        for branch in cache.branches:
            copies = branch.blocks[0].text_k.shape[0] // batch
            if known is None:
                times: Any = self._times(cache, timestep, copies)
            else:
                own = timestep[:, None].repeat(1, frames) if timestep.ndim == 1 else timestep.clone()
                own[:, : known.shape[2] * (own.shape[1] // frames)] = 0
                times = _repeat(own, copies)
            yield copies, (_repeat(latent, copies), times, context, branch, _repeat(input, copies))

    def _times(self, cache: TransformerCache, timestep: Tensor, copies: int) -> Times:
        """What the network makes of ``timestep``, kept as long as the same tensor comes again."""
        if len(cache.times) > 64:
            cache.times.clear()
        key = id(timestep), copies, torch.is_grad_enabled()
        if key not in cache.times or cache.times[key][0] is not timestep:
            cache.times[key] = timestep, self.network.times(_repeat(timestep, copies))
        return cache.times[key][1]

    def _prepared(self, cache: TransformerCache, input: Any) -> Any:
        """What the network makes of the chunk's controls before any pass."""
        if cache.prepared is None or cache.prepared[0] is not input:
            cache.prepared = None  # so that two are never held at once
            prepared = self.network.prepare(input)
            if not self.config.reuse_controls:
                return prepared
            cache.prepared = input, prepared
        return cache.prepared[1]

    def _context(self, cache: TransformerCache, latent: Tensor) -> ChunkContext:
        """Geometry of the chunk at ``cache.start``, made on its first pass and shared by the rest."""
        frames = latent.shape[2]
        if cache.chunk is not None and len(cache.chunk.rope.cos) == frames * self._tokens(cache.layout):
            return cache.chunk
        start, stop = cache.start, cache.start + frames
        rope = self._rope(range(start, stop), cache.layout, latent)
        window = self.config.window_size_t
        rows, columns = self._grid(cache.layout)
        where: Any = {"start": start, "shape": (frames, rows, columns)}
        if window is None:
            if start:
                raise ValueError("this model has no rolling window and makes a single chunk; set window_size_t")
            cache.chunk = self._placed(ChunkContext(rope, **where))
            return cache.chunk
        geometry = self._geometry(cache.layout)
        cache.chunk = ChunkContext(
            rope,
            geometry.token_slots(start, stop).to(latent.device),
            geometry.visible(stop) * geometry.tokens_per_frame,
            max(0, min(stop, geometry.sink) - start) * geometry.tokens_per_frame if geometry.relative else 0,
            **where,
        )
        cache.chunk = self._placed(cache.chunk)
        if geometry.relative and stop > window:
            self._rotate_sinks(cache, geometry, stop, latent)
        return cache.chunk

    def _placed(self, context: ChunkContext) -> ChunkContext:
        return replace(context, place=self.network.place(context))

    def _rotate_sinks(self, cache: TransformerCache, geometry: CacheGeometry, stop: int, like: Tensor) -> None:
        """Bring the raw-kept sink keys to the positions they have while the chunk before frame ``stop`` is made."""
        rope = self._rope(geometry.sink_positions(stop), cache.layout, like)
        for branch in cache.branches:
            for block in branch.blocks:
                assert block.self_kv is not None
                block.self_kv.rotate_sink(rope, min(cache.start, geometry.sink) * geometry.tokens_per_frame)

    def _rope(self, frames: range, layout: Layout, like: Tensor) -> Rope:
        network = self.config.network
        rows, columns = self._grid(layout)
        dtype = torch.promote_types(like.dtype, torch.float32)
        return rope_3d(frames, rows, columns, network.head_dim, network.rope_theta, dtype).to(like.device)

    def _grid(self, layout: Layout) -> tuple[int, int]:
        """Rows and columns of one latent frame, in tokens."""
        _, ph, pw = self.config.network.patch_size
        return layout.height // ph, layout.width // pw

    def _tokens(self, layout: Layout) -> int:
        """Tokens of one latent frame."""
        rows, columns = self._grid(layout)
        return rows * columns

    def _geometry(self, layout: Layout) -> CacheGeometry:
        config = self.config
        assert config.window_size_t is not None
        relative = config.rope == "cache_relative"
        return CacheGeometry(config.window_size_t, config.sink_size_t, self._tokens(layout), relative)

    def _empty_kv(self, geometry: CacheGeometry, batch: int) -> RollingKVCache:
        weight = self.network.patch_embedding.weight
        network = self.config.network
        return self.kv_cache(geometry, batch, network.num_heads, network.head_dim, weight.dtype, weight.device)

    def _stamped(self, cache: TransformerCache, frames: int) -> Tensor | None:
        """Given latents ``[B, C, T, H, W]`` of the first frames of the chunk at ``cache.start``, if there are any."""
        known = cache.conditions.image_latent if self.config.stamp_image_latent else None
        if known is None or cache.start >= known.shape[2]:
            return None
        return known[:, :, cache.start : cache.start + frames]

    def _check(self, conditions: WanConditions, layout: Layout) -> None:
        """The conditions are those that this model needs, of this rollout's size."""
        latent, takes_text = conditions.image_latent, self.config.takes_text
        if takes_text != (conditions.text is not None):
            raise ValueError(f"this model takes {'a' if takes_text else 'no'} text; the conditions hold the opposite")
        if self.config.concat_image_mask_to_latent and (latent is None or conditions.image_mask is None):
            raise ValueError("this model makes a video from an image; none was given")
        if self.config.network.image_dim is not None and conditions.image_embed is None:
            raise ValueError("this model attends to the tokens of an image; the conditions hold none (image_embed)")
        whole = self.config.bidirectional and self.config.concat_image_mask_to_latent
        if whole and latent is not None and latent.shape[2] != layout.plan.first_len_t:
            raise ValueError(
                f"the image's clip has {latent.shape[2]} latent frames; expected {layout.plan.first_len_t}"
            )
        if latent is not None and tuple(latent.shape[-2:]) != (layout.height, layout.width):
            size = f"{layout.height}x{layout.width}"
            raise ValueError(f"the image's latent is {list(latent.shape)}; expected {size} rows and columns")

    def _encode(self, conditions: WanConditions) -> list[list[BlockCache]]:
        """Keys and values of each guidance branch: one branch at scale 0 or 1, else two, or both stacked."""
        image = conditions.image_embed
        if conditions.text is None:
            return [self.network.encode_text(None, image)]
        texts = self._branch_texts(conditions)
        return [
            self.network.encode_text(text, None if image is None else _repeat(image, len(text) // len(image)))
            for text in texts
        ]

    def _branch_texts(self, conditions: WanConditions) -> list[Tensor]:
        """Text of each guidance branch."""
        scale = self.config.guidance_scale
        assert conditions.text is not None
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


def _frames(clip: Tensor | None, start: int, count: int) -> Tensor:
    """``count`` latent frames of ``clip`` ``[B, C, T, h, w]`` from ``start`` on; its last stands for all after it."""
    assert clip is not None
    last = clip.shape[2] - 1
    if start + count <= last + 1:
        return clip[:, :, start : start + count]
    return clip[:, :, [min(frame, last) for frame in range(start, start + count)]]


def _repeat(value: Any, copies: int) -> Any:
    """``value``, a tree with the batch on axis 0 of each tensor, stacked ``copies`` times (a batch of 1 without
    copying)."""
    if copies == 1 or value is None:
        return value
    return _map(value, lambda tensor: torch.cat([tensor] * copies) if len(tensor) > 1 else _expand(tensor, copies))


def _expand(tensor: Tensor, copies: int) -> Tensor:
    return tensor.expand(copies, *tensor.shape[1:])


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
