"""The cache tree: everything that belongs to one rollout."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from flashdreams.core.noise import Noise
from flashdreams.infra.layout import Layout


@dataclass
class RecentLatents:
    """Clean latents of the frames still in the context, small beside keys and values: the sink and the ring.

    Context can be rebuilt from them after a change of prompt or weights.
    """

    sink: int
    ring: int | None
    """``None``: everything is kept."""
    frames: dict[int, Tensor] = field(default_factory=dict)
    """Latent ``[B, C, H, W]`` by absolute frame."""

    def add(self, start: int, latent: Tensor) -> None:
        """Append the frames of ``latent`` ``[B, C, T, H, W]`` and drop those that left the window."""
        self.frames.update(zip(range(start, start + latent.shape[2]), latent.unbind(2), strict=True))
        if self.ring is not None:
            oldest = start + latent.shape[2] - self.ring
            for frame in [frame for frame in self.frames if self.sink <= frame < oldest]:
                del self.frames[frame]


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
    loras: dict[str, float] = field(default_factory=dict)
    """Weight of each LoRA from the next chunk on."""
    recent: dict[str, RecentLatents] = field(default_factory=dict)
    pending: dict[str, Any] = field(default_factory=dict)
