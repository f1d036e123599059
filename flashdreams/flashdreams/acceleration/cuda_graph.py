"""CUDA graphs: passes of a network are captured once and replayed, so that the host has nothing to do between kernels.

What a graph may depend on is told apart by where it stands. Parts of the rollout's cache are *state*: their tensors lie
in a slot that the rollout leases, and graphs read and write them where they are. Every other tensor among the arguments
is an *input*, copied into a buffer before the replay. Everything that is no tensor is part of the graph's *key*. What a
pass reads beside these and the weights is found when it is rehearsed, and such a network runs eagerly, saying why.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Hashable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from flashdreams.acceleration.graph_audit import Audit
from flashdreams.acceleration.graph_backend import CudaBackend, Graph, GraphBackend, check_allocator
from flashdreams.acceleration.graph_tree import HOST_FIELDS, NotGraphable, flatten, rebuild
from flashdreams.acceleration.graph_weights import Weights
from flashdreams.acceleration.slots import Node, Slot, SlotPool
from flashdreams.core.notices import say_once
from flashdreams.infra.errors import UserError
from flashdreams.infra.pipeline import StreamInferencePipeline

PASSES = ("forward", "remember", "remember_and_forward")
"""Methods of a network that are captured, of those it has."""

ONCE = ("remember_and_forward",)
"""Those that may not be repeated, as a capture does: they write one chunk where another is still to read."""

MAX_CAPTURES = 64
"""Graphs of one slot, and captures for one rollout. A window fills in at most ceil(window / len_t) lengths, each with a
pass that predicts, one that commits and maybe one that does both, for each guidance branch; far more are a sign that
something in the arguments changes with every chunk."""


class Graphs:
    """The graphs of one network, and the slots of the rollouts they are for.

    Graphs stay valid while weights change in place (LoRAs, new weights copied in); where weights have moved between two
    chunks, all are captured anew. They are replayed one at a time: one pipeline is not for two threads.

    Args:
        max_slots: rollouts that have graphs at the same time.
    """

    def __init__(self, transformer: nn.Module, backend: GraphBackend, max_slots: int) -> None:
        self.owner = type(transformer.network).__name__
        self.backend = backend
        self.pool = SlotPool(max_slots, partial(_discard, backend))
        self._paused = False
        self.captures = self.replays = 0
        self.refused: dict[str, str] = {}
        """Passes that are not captured any more, and why."""
        self._weights = Weights(transformer)
        self._inputs: WeakValueDictionary[Hashable, Tensor] = WeakValueDictionary()  # graphs hold them

    def invalidate(self) -> None:
        """Forget every graph, and what was refused: for whoever changes what passes compute, beyond the values of
        weights."""
        self._forget()
        self.refused.clear()

    def __deepcopy__(self, memo: Any) -> None:
        """A copy of a network has no graphs."""

    @contextmanager
    def pause(self) -> Generator[None]:
        """Within it passes run eagerly."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    @contextmanager
    def boundary(self, cache: Any) -> Generator[None]:
        """Around a pass that commits a chunk: weights may have changed before it and may change after it."""
        slot = self.pool.slot(cache)
        if slot is not None:
            slot.checked = False
        yield
        if slot is not None:
            slot.checked = False

    def run(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``function(*args, **kwargs)``, from a graph where that can be."""
        node = next((node for arg in args if (node := self.pool.node(arg)) is not None), None)
        if node is None or self._paused or torch.is_grad_enabled():
            return function(*args, **kwargs)
        if not node.slot.checked and self._weights.moved():
            say_once(
                f"the weights of {self.owner} lie elsewhere than before, and CUDA graphs are captured anew; copy new "
                "weights into the old tensors to keep them"
            )
            self._forget()
        node.slot.checked = True
        try:
            if node.refresh():
                _discard(self.backend, node.slot)
            tensors, form = flatten((args, kwargs), {id(node.value): node.path}, HOST_FIELDS)
        except NotGraphable as reason:
            self._refuse(name, str(reason))
            return function(*args, **kwargs)
        key = name, form
        captured = node.slot.graphs.get(key) or self._capture(name, function, node, key, tensors)
        if captured is None:
            return function(*args, **kwargs)
        self.replays += 1
        return captured(tensors)

    def _capture(
        self, name: str, function: Callable[..., Any], node: Node, key: tuple[str, Hashable], tensors: list[Tensor]
    ) -> Captured | None:
        """The pass of ``key``; ``None`` where it is to run eagerly."""
        slot = node.slot
        if name in self.refused:
            return None
        if slot.captured >= MAX_CAPTURES:
            self._refuse(name, f"{MAX_CAPTURES} graphs are captured for one rollout and none fits this pass")
            return None
        if len(slot.graphs) >= MAX_CAPTURES:  # of rollouts that began in many ways
            _discard(self.backend, slot)
        inputs = [self._input(place, tensor) for place, tensor in enumerate(tensors)]

        def run() -> Any:
            args, kwargs = rebuild(key[1], inputs, {node.path: node.value})
            return function(*args, **kwargs)

        before = [tensor.to("cpu", copy=True) for tensor in slot.tensors] if name in ONCE else []
        try:
            with torch.inference_mode(False), torch.no_grad():
                _fill(inputs, tensors)
                with torch.compiler.set_stance("force_eager"), Audit([*inputs, *slot.tensors, *self._weights], inputs):
                    run()
                self.backend.warm_up(run)
                graph, output = self.backend.capture(run)
        except Exception as reason:  # what is wrong with the pass itself comes again when it is run eagerly
            self._refuse(name, str(reason).partition("\n")[0])
            return None
        finally:
            for tensor, value in zip(slot.tensors, before, strict=False):
                tensor.copy_(value)
        self.captures += 1
        slot.captured += 1
        slot.graphs[key] = Captured(graph, inputs, *flatten(output))
        return slot.graphs[key]

    def _forget(self) -> None:
        for slot in self.pool.slots:
            _discard(self.backend, slot)

    def _input(self, place: int, like: Tensor) -> Tensor:
        """The buffer of argument number ``place``, shared by all graphs: each fills it before it is replayed."""
        form = place, tuple(like.shape), like.dtype, like.device
        buffer = self._inputs.get(form)
        if buffer is None:
            with torch.inference_mode(False):
                buffer = self._inputs[form] = torch.empty_like(like, requires_grad=False)
        return buffer

    def _refuse(self, name: str, reason: str) -> None:
        self.refused[name] = reason
        say_once(f"{self.owner}.{name} runs without CUDA graphs: {reason}")


@dataclass(frozen=True)
class Captured:
    """A captured pass: it reads ``inputs`` and leaves its result in ``outputs``, of which ``form`` makes the whole."""

    graph: Graph
    inputs: list[Tensor]
    outputs: list[Tensor]
    form: Hashable

    def __call__(self, tensors: list[Tensor]) -> Any:
        """The result for these inputs, in tensors of its own: the next replay overwrites ``outputs``."""
        _fill(self.inputs, tensors)
        self.graph.replay()
        return rebuild(self.form, [tensor.clone() for tensor in self.outputs])


def apply(
    pipeline: StreamInferencePipeline, *, max_slots: int = 2, backend: GraphBackend | None = None
) -> list[Graphs]:
    """Let every expert of ``pipeline`` run its passes from CUDA graphs; one :class:`Graphs` per expert.

    To be called last, on modules that are quantized and compiled as they will be. Rollouts that run already go on
    without graphs.

    Args:
        max_slots: rollouts that have graphs at the same time; each slot keeps the memory of a rollout for the next.
        backend: what captures; CUDA by default.

    Raises:
        UserError: graphs cannot work here; with what to do.
    """
    check_allocator(os.environ)
    if backend is None and pipeline.device.type != "cuda":
        raise UserError(
            f"cuda_graph is on and {pipeline.config.name} is on {pipeline.device}; CUDA graphs need a CUDA device: "
            "leave cuda_graph off, or choose --device cuda"
        )
    if pipeline.config.diffusion_model.swap_experts:
        raise UserError(
            f"cuda_graph is on and {pipeline.config.name} swaps its experts; CUDA graphs need weights that stay where "
            "they are: leave cuda_graph off, or set swap_experts to False"
        )
    backend = backend or CudaBackend(pipeline.device)
    experts: Any = pipeline.diffusion_model.experts
    return [_install(expert, Graphs(expert, backend, max_slots)) for expert in experts]


def _install(transformer: Any, graphs: Graphs) -> Graphs:
    """Exchange the classes of ``transformer`` and its network for subclasses that ask ``graphs`` first. (Attributes
    would keep both, and with them the weights, alive in a cycle.)"""
    network = transformer.network
    kind, whole = type(network), type(transformer)
    passes = {name: _graphed(name, getattr(kind, name)) for name in PASSES if hasattr(kind, name)}
    network.__class__ = type(kind.__name__, (kind,), {"cuda_graphs": None, **passes})
    network.cuda_graphs = graphs
    recommit = transformer.__dict__.pop("recommit", None)  # one that another transformation has put in its place

    def initialize_cache(self: Any, layout: Any, conditions: Any) -> Any:
        make = partial(whole.initialize_cache, self, layout, conditions)
        if (graphs := _graphs(self)) is None:
            return make()
        return graphs.pool.lease((layout.batch, layout.channels, layout.height, layout.width), make)

    def commit(self: Any, clean: Tensor, timestep: Tensor, cache: Any, input: Any = None) -> None:
        graphs = _graphs(self)
        with nullcontext() if graphs is None else graphs.boundary(cache):
            whole.commit(self, clean, timestep, cache, input)

    def commit_and_predict_flow(
        self: Any, clean: Tensor, noisy: Tensor, timesteps: Any, cache: Any, inputs: Any = (None, None)
    ) -> Tensor:
        graphs = _graphs(self)
        with nullcontext() if graphs is None else graphs.boundary(cache):
            return whole.commit_and_predict_flow(self, clean, noisy, timesteps, cache, inputs)

    def uncaptured(self: Any, *args: Any, **kwargs: Any) -> None:
        """A recache reads selections of the window, each of a length that comes once, and is rare."""
        graphs = _graphs(self)
        with nullcontext() if graphs is None else graphs.pause():
            recommit(*args, **kwargs) if recommit is not None else whole.recommit(self, *args, **kwargs)

    changes = {
        "initialize_cache": initialize_cache, "commit": commit, "commit_and_predict_flow": commit_and_predict_flow,
        "recommit": uncaptured,
    }  # fmt: skip
    transformer.__class__ = type(whole.__name__, (whole,), changes)
    return graphs


def _graphs(transformer: Any) -> Graphs | None:
    """None for a copy of the transformer, or another one of its class."""
    return getattr(transformer.network, "cuda_graphs", None)


def _graphed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.cuda_graphs is None:  # a copy, or another network of this class
            return function(self, *args, **kwargs)
        return self.cuda_graphs.run(name, partial(function, self), args, kwargs)

    return call


def _discard(backend: GraphBackend, slot: Slot) -> None:
    backend.discard([captured.graph for captured in slot.graphs.values()])
    slot.graphs.clear()


@torch.no_grad()
def _fill(inputs: list[Tensor], tensors: list[Tensor]) -> None:
    """In as few kernels as there are kinds of tensors."""
    torch._foreach_copy_(inputs, tensors)
