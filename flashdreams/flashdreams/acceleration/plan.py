"""What a model needs and how fast it can be, before anything is downloaded: one steady chunk on the meta device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from flashdreams.acceleration.blank import blank_conditions, blank_control
from flashdreams.acceleration.counting import WorkCounter, counting
from flashdreams.acceleration.kv_dtype import store_kv_as
from flashdreams.acceleration.offload import bytes_of
from flashdreams.acceleration.quantize import Int8Linear, quantize
from flashdreams.infra.acceleration_config import AccelerationConfig
from flashdreams.infra.cache import RecentChunks
from flashdreams.infra.chunk import tensors_in
from flashdreams.infra.config import ModuleConfig, PipelineConfig
from flashdreams.infra.layout import Layout
from flashdreams.infra.load import with_checkpoints_from
from flashdreams.infra.loading import build_on_meta, expert_configs
from flashdreams.infra.rollout import levels_of


@dataclass(frozen=True)
class Part:
    """A module: where it lives, its parameters and their bytes."""

    name: str
    parameters: int
    weights: int
    dtype: str
    resident: bool = True
    """Whether it stays on the device while chunks are made."""


@dataclass(frozen=True)
class ModelPlan:
    """Figures of one rollout in its steady state (or of the one chunk of a bidirectional model).

    ``flops`` by phase (``control``, ``denoise``, ``commit``, ``decode``) of one chunk, with all its steps; a step that
    commits too is ``commit+step``. ``kinds`` is the same by kind of work. Bytes: ``state`` is what a rollout keeps,
    ``transient`` the most that there is beside it in a phase, the chunk itself and its controls included.
    """

    name: str
    height: int
    width: int
    frames: int
    """Pixel frames of one chunk."""
    latent_frames: int
    window: int | None
    steps: int
    fps: float
    parts: tuple[Part, ...]
    flops: dict[str, int]
    kinds: dict[str, int]
    state: int
    transient: dict[str, int]
    blocks: int
    """Bytes of the blocks of transformers that offload takes off the device."""
    offloaded: int
    """Bytes that are there in their place: two blocks, and what is no block of experts that would come and go."""
    notes: tuple[str, ...] = field(default=())

    @property
    def weights(self) -> int:
        """Bytes of the weights that stay on the device."""
        return sum(part.weights for part in self.parts if part.resident)

    @property
    def peak(self) -> int:
        """Most bytes at once on the device."""
        return self.weights + self.state + max(self.transient.values())

    @property
    def peak_offloaded(self) -> int:
        """The same with the transformer's blocks in the CPU's memory, and two at a time on the device."""
        return self.peak - self.blocks + self.offloaded

    @property
    def total_flops(self) -> int:
        return sum(self.flops.values())


def plan_model(
    config: PipelineConfig,
    *,
    height: int | None = None,
    width: int | None = None,
    num_frames: int | None = None,
    acceleration: AccelerationConfig | None = None,
) -> ModelPlan:
    """Run one chunk of ``config`` where nothing is computed, and count.

    Args:
        height, width: pixels; the model's own by default.
        num_frames: length of the clip of a bidirectional model; its own by default.
        acceleration: its approximations are planned with; weights in any eight bits as ``int8``.
    """
    config = with_checkpoints_from(config, "random:0")  # or a text encoder would look for its vocabulary
    height, width = height or config.height, width or config.width
    multiple = config.size_multiple
    if height % multiple or width % multiple:
        raise ValueError(f"size {height}x{width} is not a multiple of {multiple} in height and width")
    model = config.diffusion_model
    transformer = model.transformer
    if num_frames is not None and not transformer.bidirectional:
        raise ValueError(f"{config.name} goes on without end; its chunks are the same at any length")
    length = config.latent_frames(num_frames) if num_frames else None
    with torch.no_grad():
        experts = [_on_meta(expert) for expert in expert_configs(model)]
        _approximate(experts, acceleration or AccelerationConfig())
        decoder = None if config.decoder is None else _on_meta(config.decoder)
        encoder = None if config.encoder is None else _on_meta(config.encoder)
        compression = config.decoder.spatial_compression if config.decoder else 1
        layout = Layout(
            1, experts[-1].latent_channels, height // compression, width // compression, config.plan(0, length)
        )
        modules = [module for module in (*experts, decoder, encoder) if module is not None]
        with counting(*modules) as counter:
            run = _Run(config, layout, counter, experts, decoder, encoder)
            try:
                run.roll()
            except NotImplementedError as error:  # what the meta device says where values decide
                reason = str(error).partition(". ")[0][:120]
                raise ValueError(f"cannot be planned: the work depends on what the model sees ({reason})") from None
    blocks, offloaded = _offload(experts, model.swap_experts)
    return ModelPlan(
        name=config.name, height=height, width=width, frames=run.frames, latent_frames=run.latent_frames,
        window=transformer.window_size_t, steps=run.steps, fps=config.fps,
        parts=_parts(config, experts, decoder, encoder),
        flops=dict(run.flops), kinds=dict(run.kinds), state=run.state, transient=run.transient,
        blocks=blocks, offloaded=offloaded, notes=tuple(run.notes),
    )  # fmt: skip


class _Run:
    """The first chunk of a rollout, and the first from which on nothing changes any more, which is counted."""

    def __init__(
        self,
        config: PipelineConfig,
        layout: Layout,
        counter: WorkCounter,
        experts: list[Any],
        decoder: Any,
        encoder: Any,
    ) -> None:
        self.config, self.layout, self.counter = config, layout, counter
        self.experts, self.decoder, self.encoder = experts, decoder, encoder
        self.flops: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        self.transient: dict[str, int] = {}
        self.notes: list[str] = []
        self.fused = config.diffusion_model.fused_commit
        self.timestep = torch.full((1,), 500.0, device="meta")
        """Every one, and the same in each chunk, so that what is kept of those already met is not counted again."""
        scheduler = config.diffusion_model.scheduler.setup()
        boundaries = sorted((expert.sigma_low for expert in config.diffusion_model.high_noise), reverse=True)
        used = [sum(step.sigma < low for low in boundaries) for step in scheduler.steps_of(first=False)]
        self.steps = len(used)
        self.calls = Counter(used)
        """Steps of each expert."""

    def roll(self) -> None:
        transformer = self.config.diffusion_model.transformer
        conditions = self.experts[-1].conditions_type.from_dict(blank_conditions(self.config, self.layout, "meta"))
        caches = [expert.initialize_cache(self.layout, conditions) for expert in self.experts]
        decoding = self.decoder.initialize_cache() if self.decoder else None
        encoding = self.encoder.initialize_cache(self.layout) if self.encoder else None
        until, chunk = transformer.window_size_t or 0, 0
        if until:
            self._chunk(0, caches, decoding, encoding, counted=False)
            chunk = 1
            while self.layout.plan.span(chunk)[1] < until:
                chunk += 1
            chunk += self.fused  # so that the one before it, which it commits, is of its length
            for expert, cache in zip(self.experts, caches, strict=True):
                expert.skip(self.layout.plan.span(chunk - self.fused)[0] - self.layout.plan.span(0)[1], cache)
        self._chunk(chunk, caches, decoding, encoding, counted=True)

    def _chunk(self, chunk: int, caches: list[Any], decoding: Any, encoding: Any, *, counted: bool) -> None:
        start, stop = self.layout.plan.span(chunk)
        latent = torch.zeros(self.layout.shape(chunk), device="meta")
        self.latent_frames = stop - start
        self.frames = self.config.decoder.frames(start, stop) if self.config.decoder else stop - start
        self.state = self.before = self.counter.live
        with self._phase("control", counted):
            input = self._input(start, stop, encoding)
        if counted:
            self.state += self._recent(chunk, latent, input)
        for index, (expert, cache) in enumerate(zip(self.experts, caches, strict=True)):
            fused = counted and self.fused
            if fused:
                with self._phase("commit+step", True):
                    timesteps = self.timestep, self.timestep
                    expert.commit_and_predict_flow(latent, latent, timesteps, cache, (input, input))
            else:  # what is made once per chunk is made here, and some models keep of a chunk what this leaves
                with self._phase("denoise", counted):
                    expert.predict_flow(latent, self.timestep, cache, input)
            if counted and (rest := self.calls[index] - 1):
                with self._phase("denoise", True, rest):
                    expert.predict_flow(latent, self.timestep, cache, input)
            if not fused:
                with self._phase("commit", counted):
                    expert.commit(latent, self.timestep, cache, input)
        if self.decoder is not None:
            with self._phase("decode", counted):
                levels_of(self.decoder.decode(latent.to(getattr(torch, self.decoder.config.dtype)), decoding, input))

    def _recent(self, chunk: int, latent: Tensor, input: Any) -> int:
        """Bytes of the latents and controls that a rollout keeps of its chunks before ``chunk``, each as large as
        these."""
        if not self.experts[0].can_recommit:
            return 0
        kept, span = RecentChunks.of(self.config.diffusion_model.transformer), self.layout.plan.span
        for before in range(chunk):
            kept.add(span(before)[0], latent[:, :, : span(before)[1] - span(before)[0]])
        return len(kept.chunks) * sum(tensor.nbytes for tensor in tensors_in((latent, input)))

    @contextmanager
    def _phase(self, name: str, counted: bool, times: int = 1) -> Generator[None]:
        self.counter.reset()
        yield
        if counted:
            self.flops[name] += times * sum(self.counter.flops.values())
            self.kinds.update({kind: times * flops for kind, flops in self.counter.flops.items()})
            self.transient[name] = max(self.transient.get(name, 0), self.counter.peak - self.before)

    def _input(self, start: int, stop: int, cache: Any) -> Any:
        """What the streaming encoder makes of controls like those it takes."""
        if self.encoder is None:
            return None
        config = self.config.encoder
        assert config is not None
        control = blank_control(self.config, self.layout)
        made = self.encoder.encode([[control] * (self.frames + config.lookahead)], start, stop, cache)
        return tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, made)


def _on_meta(config: ModuleConfig) -> Any:
    module = build_on_meta(config)
    return module.to("meta").to(getattr(torch, config.dtype)).eval().requires_grad_(False)


def _approximate(experts: list[Any], acceleration: AccelerationConfig) -> None:
    if acceleration.kv_dtype != "model":
        store_kv_as(experts, acceleration.kv_dtype)
    if acceleration.quantize != "none":
        for expert in experts:
            for block in expert.blocks:
                quantize(block, Int8Linear, torch.device("meta"))


def _offload(experts: list[Any], swap: bool) -> tuple[int, int]:
    """Bytes of the blocks that are on the device, and of what there is in their place with offload."""
    blocks = [[bytes_of(block) for block in expert.blocks] for expert in experts]
    sizes = [size for own in blocks for size in own]
    slots = min(2, len(sizes)) * max(sizes, default=0)
    if not swap:
        return sum(sizes), slots
    rest = (_bytes(expert) - sum(own) for expert, own in zip(experts[1:], blocks[1:], strict=True))
    return sum(blocks[0]), slots + sum(rest)


def _bytes(module: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in (*module.parameters(), *module.buffers()))


def _parts(config: PipelineConfig, experts: list[Any], decoder: Any, encoder: Any) -> tuple[Part, ...]:
    """Every module of the pipeline, those that come and go included."""
    swap = config.diffusion_model.swap_experts
    parts = []
    for number, expert in enumerate(experts):
        name = "transformer" if len(experts) == 1 else f"transformer {number} ({'low' if number else 'high'} noise)"
        parts.append(_part(name, expert, expert.config.dtype, not swap or number == 0))
    for name, module in (("decoder", decoder), ("encoder", encoder)):
        if module is not None:
            parts.append(_part(name, module, module.config.dtype, True))
    if config.text_encoder is not None:
        own = config.text_encoder
        stays = own.residence == "device" and not own.cache_embeddings
        parts.append(_part("text encoder", _on_meta(own), own.dtype, stays))
    if config.image_encoder is not None:
        parts.append(_part("image encoder", _on_meta(config.image_encoder), config.image_encoder.dtype, True))
    return tuple(part for part in parts if part.parameters)


def _part(name: str, module: nn.Module, dtype: str, resident: bool) -> Part:
    codes = (buffer for buffer in module.buffers() if buffer.dtype == torch.int8)
    return Part(name, sum(p.numel() for p in (*module.parameters(), *codes)), _bytes(module), dtype, resident)
