"""A segment's context, made again chunk by chunk with the calls that made it in serving."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from flashdreams.core.controls import control_from_json
from flashdreams.core.kv_cache import RollingKVCache
from flashdreams.core.rope import Rope, apply_rope
from flashdreams.infra.diffusion_model import VIDEO
from flashdreams.rollout.segment import Chunk, Event, Segment

if TYPE_CHECKING:
    from flashdreams.infra.pipeline import StreamInferencePipeline

ContextGrad = Literal["none", "detached", "full"]


class FunctionalKVCache(RollingKVCache):
    """Every write makes new buffers, so that a graph keeps what it has read."""

    def write(self, k: Tensor, v: Tensor, slots: Tensor) -> None:
        self.keys = self.keys.index_copy(2, slots, k.transpose(1, 2).to(self.keys.dtype))
        self.values = self.values.index_copy(2, slots, v.transpose(1, 2).to(self.values.dtype))

    def write_raw_sink(self, raw_k: Tensor, slots: Tensor, count: int) -> None:
        if self.raw_sink is not None:
            self.raw_sink = self.raw_sink.index_copy(1, slots[:count], raw_k[:, :count].to(self.raw_sink.dtype))

    def rotate_sink(self, rope: Rope, count: int) -> None:
        if self.raw_sink is not None and count:
            rotated = apply_rope(self.raw_sink[:, :count], rope[:count]).transpose(1, 2)
            self.keys = torch.cat((rotated, self.keys[:, :, count:]), dim=2)

    def detach(self) -> None:
        """Forget how what is stored was computed."""
        self.keys, self.values = self.keys.detach(), self.values.detach()
        self.raw_sink = None if self.raw_sink is None else self.raw_sink.detach()


class Context:
    """Where a segment stands. For each chunk in turn: :meth:`enter`, any number of :meth:`flow`, :meth:`commit`.

    Args:
        grad: ``none``: the very calls of serving. ``detached``: flows have a gradient to the weights, but the context
            is as given. ``full``: the context has one too, through every commit.
    """

    def __init__(self, pipeline: StreamInferencePipeline, segment: Segment, grad: ContextGrad) -> None:
        self.pipeline, self.model = pipeline, pipeline.diffusion_model
        self.grad: ContextGrad = grad
        self._stores: list[FunctionalKVCache] = []
        if grad != "none":
            _check_trainable(pipeline)
        with torch.no_grad(), self._functional():
            self.cache: Any = pipeline.initialize_cache(
                conditions=segment.conditions, height=segment.height, width=segment.width, loras=segment.loras
            )
        self.cache.layout = replace(self.cache.layout, plan=segment.frames)
        for expert in self.cache.experts:
            expert.layout = self.cache.layout
        self._input: Any = None

    def enter(self, chunk: Chunk) -> None:
        """Do what was done between the chunk before and this one, and take its controls."""
        with torch.set_grad_enabled(self.grad == "full"):
            for event in chunk.events:
                self._apply(event)
        rows = [[control_from_json(control) for control in row] for row in chunk.controls]
        self._input = self.pipeline.encode_controls(rows, chunk.index, self.cache)
        self.model.loras.use(self.cache.loras)

    def flow(self, x: Tensor, timestep: Tensor, sigma: float) -> Tensor:
        """The network's flow at ``x`` ``[B, C, T, H, W]``, as the expert for ``sigma`` sees it; changes no context.

        Args:
            timestep: float32 ``[B]``.
        """
        cache, model = self.cache, self.model
        if self.grad != "none":
            model.set_conditions(cache, cache.conditions)  # keys and values of the text, in a graph of this pass alone
        k = model.expert_index(sigma)
        x = model.transformer.stamp(x, cache.experts[-1])
        flow = model.expert(k).predict_flow(x, timestep, cache.experts[k], self._input)
        self._settle()
        return flow

    def commit(self, chunk: Chunk) -> None:
        """Make the finished chunk part of the context."""
        cache = self.cache
        cache.pending = {VIDEO: chunk.clean[VIDEO].to(self.pipeline.device), "input": self._input}
        with torch.set_grad_enabled(self.grad == "full"):
            if self.grad == "full":
                self.model.set_conditions(cache, cache.conditions)
            self.model.finalize(chunk.index, cache)

    def _apply(self, event: Event) -> None:
        cache, model = self.cache, self.model
        if event.kind == "loras":
            cache.loras = dict(event.loras)
            model.set_conditions(cache, cache.conditions)
            return
        slots = {name: value.to(self.pipeline.device) for name, value in (event.conditions or {}).items()}
        conditions = type(cache.conditions).from_dict(slots)
        if event.policy == "reset":
            with self._functional():
                model.reset(cache, conditions)
            return
        model.set_conditions(cache, conditions)
        if event.policy == "recache":
            model.recache(cache)

    def _settle(self) -> None:
        """What a prediction left in the slots of its own chunk is no part of the context."""
        if self.grad == "detached":
            for store in self._stores:
                store.detach()

    @contextmanager
    def _functional(self) -> Generator[None]:
        """Within it, rolling caches are made that a gradient may go through, if there is to be one."""
        if self.grad == "none":
            yield
            return

        def make(*args: Any, **kwargs: Any) -> FunctionalKVCache:
            self._stores.append(FunctionalKVCache(*args, **kwargs))
            return self._stores[-1]

        experts: Any = list(self.model.experts)
        for expert in experts:
            expert.kv_cache = make
        try:
            yield
        finally:
            for expert in experts:
                del expert.kv_cache


def _check_trainable(pipeline: StreamInferencePipeline) -> None:
    """Refuse a gradient through what was made for serving alone."""
    done, name = pipeline.acceleration, pipeline.config.name
    if done is not None and (done.regions or done.cuda_graphs or done.approximations):
        raise ValueError(
            f"{name} is accelerated ({'; '.join(done.notes)}), and gradients do not go through that; load it without "
            "(load_pipeline(..., acceleration=AccelerationConfig(compile='off', cuda_graph=False)))"
        )
    experts: Any = list(pipeline.diffusion_model.experts)
    if any("kv_cache" in vars(expert) for expert in experts):
        raise ValueError(f"{name} keeps keys and values in another form; load it without, to train it")
