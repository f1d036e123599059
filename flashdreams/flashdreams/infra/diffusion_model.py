"""The chunk loop: denoise a chunk, then commit it."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from flashdreams.config import ConfigError
from flashdreams.infra.cache import PipelineCache, RecentChunks
from flashdreams.infra.config import DiffusionModelConfig
from flashdreams.infra.layout import Layout
from flashdreams.infra.loras import Loras
from flashdreams.infra.transformer import Transformer

VIDEO = "video"
"""Name of the component whose state this model keeps; joint models have more."""

TORN = "torn"
"""Mark in ``PipelineCache.pending`` that the context is between two chunks, for good if a pass has failed there."""


class DiffusionModel(nn.Module):
    """One transformer, or several by noise level, and the scheduler that drives them.

    Args:
        home: where weights are at first, for ``acceleration`` to bring to ``device``; by default there.
    """

    def __init__(self, config: DiffusionModelConfig, device: str = "cpu", home: str | None = None) -> None:
        super().__init__()
        self.config = config
        if config.fused_commit:
            _check_fused_commit(config)
        experts = sorted(config.high_noise, key=lambda expert: -expert.sigma_low)
        self.boundaries = tuple(expert.sigma_low for expert in experts)
        configs = [*(expert.transformer for expert in experts), config.transformer]
        self.device = torch.device(device)
        home = "cpu" if config.swap_experts else home or device
        self.experts = nn.ModuleList(transformer.setup(device=home) for transformer in configs)
        if config.fused_commit:
            self.transformer.check_fused_commit()
        self.scheduler = config.scheduler.setup()
        self.loras = Loras(self.experts)
        self.weight_version = 0
        """How often weights were changed since they were loaded (:meth:`weights_changed`)."""

    @property
    def transformer(self) -> Transformer:
        """The expert of the lowest noise, the only one of most models, wherever it is."""
        return self.experts[-1]  # ty: ignore[invalid-explicit-return]

    def expert_index(self, sigma: float) -> int:
        """Which expert predicts at noise level ``sigma``."""
        return next((i for i, boundary in enumerate(self.boundaries) if sigma >= boundary), len(self.boundaries))

    def expert(self, index: int) -> Transformer:
        """The expert of this number, on the device."""
        chosen: Any = self.experts[index]
        if self.config.swap_experts and next(chosen.parameters()).device.type != self.device.type:
            for other in self.experts:
                other.to("cpu")
            chosen.to(self.device)
        return chosen

    def initialize_cache(self, layout: Layout, conditions: Any) -> list[Any]:
        """One cache per expert."""
        last_first = [self.expert(i).initialize_cache(layout, conditions) for i in reversed(range(len(self.experts)))]
        return last_first[::-1]  # so that the expert of the first steps is the one that is left on the device

    def recent(self) -> dict[str, RecentChunks]:
        """Empty stores of recent chunks, by component; none for a model that has no use for them."""
        return {VIDEO: RecentChunks.of(self.config.transformer)} if self.transformer.can_recommit else {}

    def set_conditions(self, cache: PipelineCache, conditions: Any) -> None:
        """Exchange the conditions of a rollout; the committed context stays."""
        self.loras.use(cache.loras)
        for i, expert_cache in enumerate(cache.experts):
            self.expert(i).set_conditions(expert_cache, conditions)
        cache.conditions = conditions

    def recache(self, cache: PipelineCache) -> None:
        """Rebuild the context of every expert from the recent chunks, under the present conditions and weights."""
        self.loras.use(cache.loras)
        chunks = cache.recent[VIDEO].chunks
        if not chunks:
            return
        timestep = self._timestep(1000 * self.config.transformer.context_noise, next(iter(chunks.values()))[0])
        for i, expert_cache in enumerate(cache.experts):
            self.expert(i).recommit(chunks, timestep, expert_cache)

    def reset(self, cache: PipelineCache, conditions: Any) -> None:
        """Begin an empty context at the next chunk, under other conditions."""
        self.loras.use(cache.loras)
        cache.experts = self.initialize_cache(cache.layout, conditions)  # may refuse; nothing has changed by then
        cache.conditions, cache.recent = conditions, self.recent()
        cache.origin = cache.layout.plan.frames_until(cache.autoregressive_index)

    def weights_changed(self) -> None:
        """Say that weights were changed in place, as by an optimiser's step. Rollouts that run take the new ones from
        their next chunk on, with a context made anew. Captured graphs read weights where they lie, and stay valid."""
        self.weight_version += 1

    def _renew(self, cache: PipelineCache) -> None:
        """Bring a rollout to the present weights."""
        chunks = cache.recent[VIDEO].chunks if cache.recent else {}
        if not chunks and cache.layout.plan.frames_until(cache.autoregressive_index) > cache.origin:
            raise ValueError(
                "weights were changed in the middle of a rollout whose context cannot be made anew; start another"
            )
        self.set_conditions(cache, cache.conditions)
        if chunks:
            self.recache(cache)
        cache.weight_version = self.weight_version

    def generate(self, autoregressive_index: int, cache: PipelineCache, input: Any = None) -> Tensor:
        """Clean latent ``[B, C, T, H, W]`` of the next chunk, left pending until :meth:`finalize`, or with
        ``fused_commit`` until the chunk after it.

        Args:
            autoregressive_index: the chunk's number, which must be ``cache.autoregressive_index``, or the one after it
                if that chunk is pending and ``fused_commit`` is on.
            input: its controls.
        """
        i, fused = autoregressive_index, bool(cache.pending) and self.config.fused_commit
        _check_whole(cache)
        if i != cache.autoregressive_index + fused or (cache.pending and not fused):
            state = "chunk %d waits for finalize" if cache.pending else "the next chunk is %d"
            raise ValueError(f"generate({i}) is out of order: " + state % cache.autoregressive_index)
        self.loras.use(cache.loras)
        (start, stop), renew = cache.layout.plan.span(i), cache.weight_version != self.weight_version
        given = cache.given is not None and stop <= cache.given.shape[2]
        if fused:
            fits = self.transformer.can_fuse(cache.pending[VIDEO], stop - start, cache.experts[-1])
            if given or renew or cache.driver is not None or not fits:
                self.finalize(i - 1, cache)
        if renew:
            self._renew(cache)
        if given:
            clean = cache.given[:, :, start:stop]
        else:
            clean = self._denoise(i, cache, input)
        cache.pending = {VIDEO: clean, "input": input}
        return clean

    def finalize(self, autoregressive_index: int, cache: PipelineCache) -> None:
        """Commit the pending chunk to every expert's context and move on to the next."""
        i = autoregressive_index
        if i != cache.autoregressive_index or not cache.pending:
            raise ValueError(f"finalize({i}) without generate({i}); the next chunk is {cache.autoregressive_index}")
        _check_whole(cache)
        self.loras.use(cache.loras)
        clean, input = cache.pending[VIDEO], cache.pending["input"]
        timestep = self._timestep(1000 * self.config.transformer.context_noise, clean)
        bidirectional = self.config.transformer.bidirectional  # has no context, so that its weights may stay away
        for k, expert_cache in enumerate(cache.experts):
            expert: Any = self.experts[k] if bidirectional else self.expert(k)
            expert.commit(clean, timestep, expert_cache, input)
        self._committed(cache, clean, input)

    def _committed(self, cache: PipelineCache, clean: Tensor, input: Any) -> None:
        start = cache.layout.plan.span(cache.autoregressive_index)[0] - cache.origin
        for recent in cache.recent.values():
            recent.add(start, clean, input)
        cache.pending = {}
        cache.autoregressive_index += 1

    def _denoise(self, i: int, cache: PipelineCache, input: Any) -> Tensor:
        shape, (start, _) = cache.layout.shape(i), cache.layout.plan.span(i)
        dtype = torch.promote_types(next(self.parameters()).dtype, torch.float32)
        x, scheduler = cache.noise.initial(i, start, shape).to(self.device, dtype), self.scheduler
        if cache.driver is not None:
            x, scheduler = cache.driver.begin(i, x, lambda x: self.transformer.stamp(x, cache.experts[-1]))
        x = self.transformer.stamp(x, cache.experts[-1])
        state = scheduler.begin()  # one history over all steps, whichever expert predicts them
        for step in scheduler.steps_of(first=start == cache.origin):
            k = self.expert_index(step.sigma)
            timestep = self._timestep(step.timestep, x)
            if cache.pending:  # the chunk before this one
                flow = self._commit_and_predict_flow(x, timestep, cache, input)
            else:
                flow = self.expert(k).predict_flow(x, timestep, cache.experts[k], input)
            x = scheduler.transition(
                x, flow, step, lambda step=step: cache.noise.step(i, step.index, start, shape), state
            )
            x = self.transformer.stamp(x, cache.experts[-1])
        return self.transformer.postprocess_clean_latent(x, cache.experts[-1], input)

    def _commit_and_predict_flow(self, noisy: Tensor, timestep: Tensor, cache: PipelineCache, input: Any) -> Tensor:
        """Flow of the chunk after the pending one, which is committed in the same pass."""
        clean, before = cache.pending[VIDEO], cache.pending["input"]
        timesteps = self._timestep(1000 * self.config.transformer.context_noise, clean), timestep
        cache.pending = {TORN: True}  # until the pass is done: it writes the one chunk where the other still reads
        flow = self.transformer.commit_and_predict_flow(clean, noisy, timesteps, cache.experts[-1], (before, input))
        self._committed(cache, clean, before)
        return flow

    @staticmethod
    def _timestep(value: float, like: Tensor) -> Tensor:
        return _constant(value, like.shape[0], like.device)


def _check_fused_commit(config: DiffusionModelConfig) -> None:
    """Before any weights are read, what they do not decide."""
    transformer = config.transformer
    reason = (
        "several experts, each of which has a context to commit to" if config.high_noise
        else "a single chunk, which is not committed" if transformer.bidirectional
        else "a sink that moves between a commit and the next step (rope cache_relative)"
        if transformer.rope == "cache_relative" and transformer.sink_size_t
        else None
    )  # fmt: skip
    if reason:
        raise ConfigError(f"fused_commit is True, and this model has {reason}; set fused_commit to False")


def _check_whole(cache: PipelineCache) -> None:
    if TORN in cache.pending:
        raise RuntimeError(
            f"the pass that was to commit chunk {cache.autoregressive_index} and begin the next one failed and left "
            "the context incomplete; start another rollout, or resume a saved one"
        )


@lru_cache(maxsize=512)
def _constant(value: float, batch: int, device: torch.device) -> Tensor:
    """The same tensor for the same values, by which transformers know a timestep they have met."""
    with torch.inference_mode(False):
        return torch.full((batch,), value, dtype=torch.float32, device=device)
