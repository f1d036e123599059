"""A segment as one safetensors file: its tensors, and the rest as JSON in the metadata. No code is kept."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from flashdreams.infra.layout import ChunkPlan
from flashdreams.rollout.plan import Plan
from flashdreams.rollout.segment import Chunk, Event, Segment

FORMAT = "flashdreams-segment-1"
_LISTS: dict[str, Any] = {"chunks": Chunk, "events": Event}
_TUPLES = ("sigmas", "steps", "positions")


def save(segment: Segment, path: Path) -> None:
    """Write ``segment`` to ``path``."""
    tensors: dict[str, Tensor] = {}
    state = _plain(segment, tensors)
    save_file(tensors, path, metadata={"segment": json.dumps({"format": FORMAT, **state})})


def load(path: Path) -> Segment:
    """What :func:`save` wrote.

    Raises:
        ValueError: the file is none, is of another version, or its plan is not the one that ran.
    """
    try:
        with safe_open(path, framework="pt") as file:
            state = json.loads((file.metadata() or {}).get("segment", "{}"))
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError, json.JSONDecodeError) as error:
        raise ValueError(f"cannot read a segment from {path}: {error}") from None
    if state.pop("format", None) != FORMAT:
        raise ValueError(f"{path} is not a segment of this version ({FORMAT})")
    segment = _batch(Segment, state, tensors)
    if segment.plan.digest != segment.digest:
        raise ValueError(f"the plan in {path} is not the one that ran: its digest is {segment.plan.digest[:12]}, "
                         f"that of the one that ran is {segment.digest[:12]}")  # fmt: skip
    return segment


def _plain(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        key = f"t{len(tensors)}"
        tensors[key] = value.detach().cpu().contiguous().clone()
        return {"tensor": key}
    if isinstance(value, Plan):
        return value.to_dict()
    if isinstance(value, ChunkPlan):
        return asdict(value)
    if isinstance(value, (Segment, Chunk, Event)):
        return {each.name: _plain(getattr(value, each.name), tensors) for each in fields(value)}
    if isinstance(value, dict):
        return {key: _plain(item, tensors) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, tensors) for item in value]
    return value


def _batch(kind: Any, state: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    values: dict[str, Any] = {}
    for name, value in state.items():
        if name in _LISTS:
            values[name] = [_batch(_LISTS[name], item, tensors) for item in value]
        elif name == "plan":
            values[name] = Plan.from_dict(value)
        elif name == "frames":
            values[name] = ChunkPlan(**value)
        else:
            values[name] = tuple(value) if name in _TUPLES else _tensors(value, tensors)
    return kind(**values)


def _tensors(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, dict):
        if value.keys() == {"tensor"}:
            return tensors[value["tensor"]]
        return {key: _tensors(item, tensors) for key, item in value.items()}
    return value
