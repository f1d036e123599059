"""What a rollout did, as a value: enough to make its context again and to score its steps under other weights.

Keys and values are never kept. The context is a recipe: clean latents, controls, prompts and what became of the context
at each change of them; the serving calls make it again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from flashdreams.core.noise import KeyedNoise, Noise
from flashdreams.infra.diffusion_model import VIDEO
from flashdreams.infra.layout import ChunkPlan
from flashdreams.rollout.batch import CONCAT, EACH, Batch
from flashdreams.rollout.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(eq=False)
class Event(Batch):
    """A change between two chunks."""

    kind: Literal["prompt", "loras"]
    policy: str = "keep"
    """What a new prompt did to the context: ``keep``, ``recache`` or ``reset``."""
    prompts: list[str] | None = field(metadata=CONCAT, default=None)
    """For people; ``conditions`` are what counts."""
    conditions: dict[str, Tensor] | None = field(metadata=CONCAT, default=None)
    """Slots of the conditions from then on, ``[B, ...]`` each."""
    loras: dict[str, float] = field(default_factory=dict)


@dataclass(eq=False)
class Chunk(Batch):
    """One chunk. Where it was given (``steps`` empty), it has only its clean latent."""

    index: int
    start: int
    """Its first latent frame."""
    clean: dict[str, Tensor] = field(metadata=CONCAT)
    """Finished latent ``[B, C, T, H, W]`` by component: what was decoded, and committed to the context."""
    controls: list[list[dict[str, Any]]] = field(metadata=CONCAT)
    """Per sample and pixel frame, what was said (:func:`~flashdreams.core.controls.control_to_json`); frames that the
    encoder looked ahead at stand at the end."""
    sigmas: tuple[float, ...] = ()
    """Noise levels that ran, ``[T + 1]``."""
    steps: tuple[int, ...] = ()
    """Numbers of the steps that drew noise."""
    log_probs: Tensor | None = field(metadata=CONCAT, default=None)
    """Of those steps, float32 ``[B, S]``, each the mean over the chunk's active elements."""
    positions: tuple[int, ...] = ()
    """Places of the trajectory, 0 (start noise) to T, whose samples are kept: those before and after ``steps``."""
    states: dict[str, Tensor] = field(metadata=CONCAT, default_factory=dict)
    """Samples ``[B, len(positions), C, T, H, W]`` by component, in the plan's storage dtype."""
    mask: Tensor | None = field(metadata=CONCAT, default=None)
    """Bool ``[B, 1, T, 1, 1]``: False for frames that stand in the sample as they were given. ``None``: all are new."""
    kv_length: int = 0
    """Latent frames in sight, its own included."""
    weight_version: int = 0
    loras: dict[str, float] = field(default_factory=dict)
    events: list[Event] = field(metadata=EACH, default_factory=list)
    """Changes before it, in order."""

    @property
    def stop(self) -> int:
        """The latent frame after its last."""
        return self.start + self.clean[VIDEO].shape[2]

    def state(self, position: int, component: str = VIDEO) -> Tensor:
        """The sample at ``position`` of the trajectory, ``[B, C, T, H, W]``.

        Raises:
            KeyError: it was not kept.
        """
        if position not in self.positions:
            raise KeyError(f"sample {position} of chunk {self.index} was not kept; kept: {list(self.positions)}")
        return self.states[component][:, self.positions.index(position)]


@dataclass(eq=False)
class Segment(Batch):
    """A rollout from its beginning. Row ``k`` of everything is sample ``k``."""

    plan: Plan
    digest: str
    """Of the plan that ran."""
    height: int
    """Pixels."""
    width: int
    frames: ChunkPlan
    """How latent frames fall into chunks."""
    conditions: dict[str, Tensor] = field(metadata=CONCAT)
    """Slots of the conditions it began with, ``[B, ...]`` each."""
    chunks: list[Chunk] = field(metadata=EACH)
    prompts: list[str] | None = field(metadata=CONCAT, default=None)
    seed: int | None = None
    """Of keyed noise; ``None`` where noise was given."""
    sample_ids: list[str] | None = field(metadata=CONCAT, default=None)
    group_ids: list[str] | None = field(metadata=CONCAT, default=None)
    """Samples of one group began with the same noise; ``None``: each had its own."""
    loras: dict[str, float] = field(default_factory=dict)
    """Weights of LoRAs it began with."""

    def origin(self, index: int) -> int:
        """The latent frame at which the context of chunk ``index`` begins: 0, unless a prompt reset it."""
        resets = (c.start for c in self.chunks[: index + 1] if any(event.policy == "reset" for event in c.events))
        return max(resets, default=0)

    @property
    def order(self) -> tuple[str, ...]:
        """Components of a sample, in the order in which they are scored."""
        return (VIDEO,)

    @property
    def noise(self) -> Noise:
        """The source of its noise.

        Raises:
            ValueError: it was given, and is not kept.
        """
        if self.seed is None or self.sample_ids is None:
            raise ValueError("the noise of this segment was given, not drawn by a seed; give it again")
        groups = None if self.group_ids is None else tuple(self.group_ids)
        return KeyedNoise(self.seed, tuple(self.sample_ids), group_ids=groups)

    @property
    def scored(self) -> list[tuple[int, int]]:
        """Every (chunk, step) that has a log-probability, in order."""
        return [(chunk.index, step) for chunk in self.chunks for step in chunk.steps]

    def log_probs(self, select: Sequence[tuple[int, int]] | None = None) -> Tensor:
        """As sampled, float32 ``[B, len(select)]``; of all that are scored by default.

        Raises:
            KeyError: one is not scored.
        """
        columns = []
        for index, step in self.scored if select is None else select:
            chunk = next((chunk for chunk in self.chunks if chunk.index == index and step in chunk.steps), None)
            if chunk is None or chunk.log_probs is None:
                raise KeyError(f"step {step} of chunk {index} drew no noise; those that did: {self.scored}")
            columns.append(chunk.log_probs[:, chunk.steps.index(step)])
        return torch.stack(columns, dim=1) if columns else torch.zeros(self.batch_size, 0)

    def save(self, path: str | Path) -> None:
        """Write it to one safetensors file; :meth:`load` reads it."""
        from flashdreams.rollout.files import save

        save(self, Path(path))

    @staticmethod
    def load(path: str | Path) -> Segment:
        """What :meth:`save` wrote, on the CPU.

        Raises:
            ValueError: the file is none, is of another version, or its plan is not the one that ran.
        """
        from flashdreams.rollout.files import load

        return load(Path(path))
