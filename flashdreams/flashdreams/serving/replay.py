"""Make a recorded session again, here and without a server."""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashdreams.core.controls import control_from_json
from flashdreams.core.media.image import decode_image
from flashdreams.infra.rollout import Chunk
from flashdreams.rollout.plan import plan_for
from flashdreams.rollout.segment import Segment
from flashdreams.serving.recording import RecordingError, SessionRecord, read_session
from flashdreams.serving.scene import Scene
from flashdreams.serving.steered import SteeredRollout, latent_digest

if TYPE_CHECKING:
    from flashdreams.infra.pipeline import StreamInferencePipeline


@dataclass(frozen=True)
class Replayed:
    """A chunk of a session that was made again; ``same``: its latent equals the recorded one, bit for bit."""

    generation: int
    chunk: Chunk
    same: bool


def replay(path: str | os.PathLike[str], pipeline: StreamInferencePipeline | None = None) -> Iterator[Replayed]:
    """Every chunk of the session recorded at ``path``, in order.

    Args:
        pipeline: the model; by default that of the slug which the record names.

    Raises:
        RecordingError: the file is no record, or a part of it is missing.
    """
    record = read_session(path)
    if pipeline is None:
        from flashdreams.infra.load import load_pipeline

        pipeline = load_pipeline(record.model)
    with tempfile.TemporaryDirectory(prefix="flashdreams-") as folder:
        yield from _replay(record, pipeline, Path(folder))


def segments(path: str | os.PathLike[str], pipeline: StreamInferencePipeline) -> list[Segment]:
    """What was served in the session recorded at ``path``, one segment for each time it began anew: made again, and
    compared with what was handed out.

    Raises:
        RecordingError: the file is no record, or ``pipeline`` makes other latents than those that were served.
        ValueError: the session went on from a snapshot, or its controls are pixels.
    """
    record, plan, recorders = read_session(path), plan_for(pipeline), []
    with tempfile.TemporaryDirectory(prefix="flashdreams-") as folder:

        def begun(rollout: SteeredRollout, message: Mapping[str, Any]) -> None:
            recorders.append(rollout.record(plan, message["scene"]["prompt"]))

        for replayed in _replay(record, pipeline, Path(folder), begun):
            if not replayed.same:
                raise RecordingError(
                    f"chunk {replayed.chunk.index} is not what was served: {path} was recorded with other weights, "
                    "versions or threads"
                )
    return [recorder.segment for recorder in recorders]


def _replay(
    record: SessionRecord,
    pipeline: StreamInferencePipeline,
    folder: Path,
    begun: Callable[[SteeredRollout, Mapping[str, Any]], None] | None = None,
) -> Iterator[Replayed]:
    rollout: SteeredRollout | None = None
    for message in record.messages:
        if message["type"] == "begun":
            if rollout is not None:
                rollout.close()
            rollout = _begin(message, record, pipeline, folder)
            if begun is not None:
                begun(rollout, message)
        elif rollout is None:
            raise RecordingError("the record does not say how the session began")
        elif message["type"] == "snapshot":
            rollout.save(folder / Path(message["snapshot"]).name)
        else:
            if message["chunk"] != rollout.next_chunk:
                raise RecordingError(f"chunk {rollout.next_chunk} is missing; chunk {message['chunk']} follows")
            rows = [None if row is None else control_from_json(row) for row in message["controls"]]
            chunk = rollout.step(message["events"], rows).chunk
            rollout.commit()
            yield Replayed(message["generation"], chunk, latent_digest(chunk) == message["digest"])


def _begin(message: Any, record: SessionRecord, pipeline: StreamInferencePipeline, folder: Path) -> SteeredRollout:
    if message["snapshot"] is not None:
        return SteeredRollout.resume(pipeline, folder / Path(message["snapshot"]).name)
    scene = Scene.from_json(message["scene"])
    if record.image is not None:
        pixels = decode_image(io.BytesIO(record.image), "image of the record", scene.height, scene.width).pixels
        scene = replace(scene, image=pixels)
    return SteeredRollout.open(pipeline, scene)
