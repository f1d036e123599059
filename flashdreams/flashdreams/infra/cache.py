"""The cache tree: everything that belongs to one rollout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from flashdreams.core.noise import Noise
from flashdreams.infra.layout import Layout

if TYPE_CHECKING:
    from flashdreams.infra.config import TransformerConfig


@dataclass
class RecentChunks:
    """Clean latents and controls of the chunks still in the context, small beside keys and values: those with a frame
    in the sink or in the ring. The context can be rebuilt from them after a change of prompt or weights.
    """

    sink: int
    ring: int | None
    """``None``: everything is kept."""
    chunks: dict[int, tuple[Tensor, Any]] = field(default_factory=dict)
    """Latent ``[B, C, T, H, W]`` and input by the chunk's first frame, counted from the start of the context."""

    @classmethod
    def of(cls, config: TransformerConfig) -> RecentChunks:
        """None yet, for the window of this model."""
        ring = None if config.window_size_t is None else config.window_size_t - config.sink_size_t
        return cls(config.sink_size_t, ring)

    def add(self, start: int, latent: Tensor, input: Any = None) -> None:
        """Append a chunk and drop those that left the window."""
        self.chunks[start] = latent, input
        if self.ring is not None:
            oldest = start + latent.shape[2] - self.ring
            self.chunks = {
                first: chunk
                for first, chunk in self.chunks.items()
                if first < self.sink or first + chunk[0].shape[2] > oldest
            }


class Driver(Protocol):
    """Takes the scheduler's place in one rollout: what samples by a plan and records what it did."""

    def begin(self, chunk: int, x: Tensor, stamp: Callable[[Tensor], Tensor]) -> tuple[Tensor, Any]:
        """Start noise ``x`` ``[B, C, T, H, W]`` of ``chunk`` as it is to be used, and the scheduler of this chunk;
        ``stamp`` puts what is known into a sample."""
        ...


@dataclass
class PipelineCache:
    """State of one rollout. Weights and config are elsewhere and never change.

    ``given`` holds supplied latents of the first frames; ``pending`` the finished chunk and its controls between
    ``generate`` and ``finalize``, by component name.
    """

    layout: Layout
    noise: Noise
    conditions: Any
    experts: list[Any]
    """One transformer cache per expert, high noise first."""
    encoder: Any = None
    decoder: Any = None
    given: Tensor | None = None
    autoregressive_index: int = 0
    origin: int = 0
    """Latent frame at which the context begins: 0, unless it was reset."""
    loras: dict[str, float] = field(default_factory=dict)
    """Weight of each LoRA from the next chunk on."""
    recent: dict[str, RecentChunks] = field(default_factory=dict)
    pending: dict[str, Any] = field(default_factory=dict)
    driver: Driver | None = field(default=None, metadata={"derived": True})
    """What samples instead of the model's scheduler; none where the model is only served."""
    weight_version: int = field(default=0, metadata={"derived": True})
    """Version of the weights that the context is made with."""
