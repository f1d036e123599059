"""What captures and replays: CUDA, or anything that stands in for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch

from flashdreams.infra.errors import UserError

WARM_UP = 2
"""Passes before a capture, in which libraries choose their kernels and compiled code is compiled."""


class Graph(Protocol):
    """Work that was captured."""

    def replay(self) -> None:
        """Do it again, on the tensors of the capture."""


class GraphBackend(Protocol):
    """How passes are captured."""

    def warm_up(self, run: Callable[[], Any]) -> None:
        """Run it as often as a capture needs."""

    def capture(self, run: Callable[[], Any]) -> tuple[Graph, Any]:
        """The graph of ``run``, and what it returned: tensors that each replay fills anew. Whether ``run`` is executed
        meanwhile is left open."""

    def discard(self, graphs: Iterable[Graph]) -> None:
        """These will not be replayed again."""


class CudaBackend:
    """CUDA graphs that share one memory pool: they are replayed one at a time, and what they return is copied out."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream()
            self._pool = torch.cuda.graph_pool_handle()
        self._alive = 0

    def warm_up(self, run: Callable[[], Any]) -> None:
        with torch.cuda.device(self.device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                for _ in range(WARM_UP):
                    run()
            current.wait_stream(self._stream)

    def capture(self, run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        graph = torch.cuda.CUDAGraph()
        # Another thread may be decoding the last chunk: its calls are none of this capture's business.
        mode = "thread_local"
        with (
            torch.cuda.device(self.device),
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode=mode),
        ):
            output = run()
        self._alive += 1
        return graph, output

    def discard(self, graphs: Iterable[Any]) -> None:
        graphs = list(graphs)
        if not graphs:
            return
        torch.cuda.synchronize(self.device)
        for graph in graphs:
            graph.reset()
        self._alive -= len(graphs)
        if not self._alive:
            self._pool = torch.cuda.graph_pool_handle()  # a pool whose last graph is gone cannot be used again


def check_allocator(environment: Mapping[str, str]) -> None:
    """Refuse the allocator's setting that moves memory under captured graphs.

    Raises:
        UserError: it is on; with what to do.
    """
    for variable in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        settings = environment.get(variable, "").replace(" ", "").lower().split(",")
        if "expandable_segments:true" in settings:
            raise UserError(
                f"{variable} is {environment[variable]!r}, and CUDA graphs need memory that stays where it is: take "
                "expandable_segments out of it, or leave cuda_graph off"
            )
