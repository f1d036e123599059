"""Regional compilation: one compiled function for every block of a kind, whatever expert it stands in.

Shapes are fixed (``dynamic=False``) and nothing breaks the graph (``fullgraph=True``), so that a rollout needs one
compilation for each length of the window while it fills, at most ``ceil(window / len_t)``, and none afterwards.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from flashdreams.acceleration.bias import add_biases_after
from flashdreams.acceleration.kept_calls import KeptCalls
from flashdreams.core.notices import say_once

Backend = str | Callable[..., Any]

SHAPES = 256
"""Most shapes of one region in a process: every length of a filling window, for several sizes and batches."""

_allowed: ContextVar[bool] = ContextVar("allowed", default=False)
"""Whether the compiler has been told so here: its settings hold for the thread (or task) that makes them."""


class Region:
    """The ``forward`` of one kind of module, compiled for all of its instances together."""

    def __init__(self, kind: type[nn.Module], backend: Backend = "inductor") -> None:
        self.kind = kind
        self.graphs = 0
        """Compilations so far; one per shape."""
        self.broken = False
        """Whether the compiler gave up on this kind, which then runs as it is."""
        self.dry = False
        """Whether what is compiled from now on is not run as long as this holds: it returns memory as it comes. What
        cannot be compiled is an error then."""
        self.calls: KeptCalls | None = None
        """Calls of earlier processes, and those of this one for later ones; ``None``: neither."""
        self.prepare: Callable[[], None] = lambda: None
        """Called before the first compilation, if there is one at all."""
        self._paused = 0
        self._eager: Any = kind.forward
        self._backend = backend
        self._taken = type(
            kind.__name__, (kind,), {"forward": lambda module, *args, **kw: self._call(module, args, kw)}
        )

    def take(self, module: nn.Module) -> None:
        """Let ``module`` run through this region from now on. Weights, and names in its state dict, stay.

        Its class is exchanged for a subclass: an attribute ``forward`` would keep the module, and with it the weights,
        alive in a cycle.
        """
        module.__class__ = self._taken

    @contextmanager
    def paused(self) -> Generator[None]:
        """Within it the modules run uncompiled: for passes whose shapes come once."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    @cached_property
    def _compiled(self) -> Any:
        """Made when it is needed: that imports the compiler."""
        self.prepare()
        return torch.compile(_own(self._eager), fullgraph=True, dynamic=False, backend=self._compile)

    def _compile(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        add_biases_after(graph)
        compiler: Any = self._backend
        if isinstance(compiler, str):
            compiler = torch._dynamo.lookup_backend(compiler)
        compiled = compiler(graph, inputs) if self.calls is None else self.calls.note(lambda: compiler(graph, inputs))
        return self._dry_at_first(compiled, graph) if self.dry else compiled

    def _dry_at_first(self, compiled: Any, graph: Any) -> Any:
        """``compiled``, which while :attr:`dry` holds computes nothing and writes to no input."""
        outputs = [node.meta.get("example_value") for node in graph.graph.find_nodes(op="output")[0].all_input_nodes]
        returned = graph.graph.find_nodes(op="output")[0].args[0]
        if len(outputs) != len(returned) or not all(isinstance(value, Tensor) for value in outputs):
            return compiled  # something else than tensors, or one twice: it is run
        layouts = [(tuple(x.shape), x.stride(), x.dtype, x.device) for x in outputs]

        def run(*args: Any) -> Any:
            if not self.dry:
                return compiled(*args)
            return [
                torch.empty_strided(shape, stride, dtype=dtype, device=device)
                for shape, stride, dtype, device in layouts
            ]

        return run

    def _call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._paused or self.broken:
            return self._as_it_is(module, args, kwargs)
        args = tuple(_laid_out(value) if isinstance(value, Tensor) else value for value in args)
        if self.calls is not None and (kept := self.calls.find((module, *args), kwargs)) is not None:
            return kept(self.dry)
        try:
            run = self._compiled
            if not _allowed.get():
                _allow(SHAPES)
            if self.calls is None:
                return run(module, *args, **kwargs)
            return self.calls.watch((module, *args), kwargs, lambda: run(module, *args, **kwargs))
        except _failures() as error:  # nothing has run: a graph is compiled whole before it is used
            self.broken = True
            reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            say_once(f"{self.kind.__name__} cannot be compiled here and runs uncompiled: {reason.strip()[:200]}")
            return self._as_it_is(module, args, kwargs)

    def _as_it_is(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.broken and self.dry:
            raise RuntimeError(f"{self.kind.__name__} is not compiled, and nobody waits for what it makes")
        return self._eager(module, *args, **kwargs)


def compile_modules(
    modules: Iterable[nn.Module], backend: Backend = "inductor", known: Iterable[Region] = ()
) -> list[Region]:
    """Compile modules by kind: each kind once, however many there are of it.

    Args:
        known: regions to be used for their kinds; they hold what was compiled for other modules like these.
    """
    regions = {region.kind: region for region in known}
    for module in modules:
        kind = type(module)
        if kind not in regions:
            regions[kind] = Region(kind, backend)
        regions[kind].take(module)
    return list(regions.values())


def _laid_out(tensor: Tensor) -> Tensor:
    """``tensor`` in the one layout that is compiled for. (A part of a batch of one is contiguous, and yet has the
    strides of the whole until it is viewed.)"""
    return tensor.contiguous().view(tensor.shape)


def _own(function: Any) -> Any:
    """A copy of ``function`` with code of its own: compiled code hangs on the code object, so that what is compiled for
    one pipeline is counted apart from another's, and freed with it."""
    copy = types.FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__,
        function.__closure__,
    )  # fmt: skip
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _allow(shapes: int) -> None:
    """Lift PyTorch's limit on the shapes of one function, which is meant for shapes that change by accident."""
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, shapes)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 16 * shapes)
    _allowed.set(True)


def _failures() -> tuple[type[BaseException], ...]:
    """What the compiler raises when it cannot compile, as opposed to what compiled code raises."""
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.exc import InductorError

    return TorchDynamoException, InductorError
