"""A rollout that is told everything at chunk boundaries: the worker's side of a session, and its replay."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from flashdreams.core.controls import Control
from flashdreams.infra.chunk import Chunk, tensors_in
from flashdreams.infra.health import check_chunk
from flashdreams.infra.rollout import ControlSource, Rollout
from flashdreams.rollout.plan import Plan
from flashdreams.rollout.recorder import Recorder, record
from flashdreams.serving.scene import Scene

if TYPE_CHECKING:
    from flashdreams.infra.config import PipelineConfig
    from flashdreams.infra.pipeline import StreamInferencePipeline


@dataclass
class Step:
    """A chunk, and what became of the events before it."""

    chunk: Chunk
    first_frame: int
    refused: list[str] = field(default_factory=list)


class SteeredRollout:
    """Events and the controls of a chunk's frames are given with the step that makes it, so the same steps make the
    same video wherever they are repeated."""

    def __init__(self, begin: Callable[[ControlSource], Rollout], given: bool) -> None:
        self._rows: Sequence[Control | None] = ()
        self._rollout = begin(lambda start, stop: self._rows[: stop - start])
        self._given = given
        """Whether the first chunk may be of one colour, as a given image is."""
        self._last: Chunk | None = None

    @classmethod
    def open(cls, pipeline: StreamInferencePipeline, scene: Scene) -> SteeredRollout:
        """Begin ``scene``."""
        image = None if scene.image is None else torch.from_numpy(scene.image.copy())

        def begin(control: ControlSource) -> Rollout:
            return pipeline.rollout(
                scene.prompt, seed=scene.seed, negative_prompt=scene.negative_prompt, height=scene.height,
                width=scene.width, image=image, control=control if takes_controls(pipeline.config) else None,
            )  # fmt: skip

        return cls(begin, image is not None)

    @classmethod
    def resume(cls, pipeline: StreamInferencePipeline, path: Path) -> SteeredRollout:
        """Go on with a state that :meth:`save` wrote."""
        controlled = takes_controls(pipeline.config)
        return cls(lambda control: pipeline.resume(path, control=control if controlled else None), True)

    @property
    def next_controls(self) -> tuple[int, int]:
        """Frames whose controls the next step needs."""
        return self._rollout.next_controls

    @property
    def next_chunk(self) -> int:
        """Number of the next chunk."""
        cache = self._rollout.cache
        return cache.autoregressive_index + bool(cache.pending)

    @property
    def next_frame(self) -> int:
        """Number of the next chunk's first frame."""
        return self._rollout.frame

    @property
    def num_bytes(self) -> int:
        """Of the tensors of its state."""
        return state_bytes(self._rollout.cache)

    def step(self, events: Sequence[Mapping[str, Any]], rows: Sequence[Control | None]) -> Step:
        """Apply ``events`` in order, then make a chunk under the controls ``rows``.

        An event that the model refuses changes nothing and is told.
        """
        refused = []
        for event in events:
            try:
                self._apply(event)
            except ValueError as error:
                refused.append(str(error))
        self._rows = rows
        first = self._rollout.frame
        chunk = self._last = next(self._rollout)
        dtype = self._rollout.pipeline.config.diffusion_model.transformer.dtype
        check_chunk(chunk, dtype, may_be_constant=self._given)
        return Step(chunk, first, refused)

    def commit(self) -> float:
        """Do what remains of the last chunk once its frames are handed out; returns its seconds."""
        self._rollout.flush()
        return self._last.timings.get("commit", 0.0) if self._last else 0.0

    def save(self, path: Path) -> None:
        """Write the state at this chunk boundary."""
        self._rollout.save(path)

    def record(self, plan: Plan, prompt: str) -> Recorder:
        """Sample by ``plan`` from the first chunk on and keep what is done, as ``record(...).segment``.

        Raises:
            ValueError: chunks were made already, or its controls are pixels.
        """
        return record(self._rollout, plan, prompts=[prompt])

    def close(self) -> None:
        """Free the memory."""
        self._rollout.close()

    def _apply(self, event: Mapping[str, Any]) -> None:
        if event["type"] != "prompt":
            raise ValueError(f"event {event['type']!r} is unknown")
        self._rollout.set_prompt(event["prompt"], event.get("negative_prompt"), policy=event.get("policy"))


def takes_controls(config: PipelineConfig) -> bool:
    """Whether a model is steered by more than its prompt."""
    return config.encoder is not None and bool(config.encoder.takes)


def latent_digest(chunk: Chunk) -> str:
    """Of the chunk's latent, for comparing runs without sending it."""
    data = chunk.host_latent.float().contiguous().numpy()
    return hashlib.blake2b(data.tobytes(), digest_size=16).hexdigest()


def state_bytes(value: Any) -> int:
    """Bytes of all tensors that ``value`` holds, at any depth, each storage once."""
    storages = [tensor.untyped_storage() for tensor in tensors_in(value)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
