"""Which of the dicts in a training dump is the model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from flashdreams.core.checkpoint.errors import CheckpointError

_EMA = re.compile(r"(?:^|[_.])ema(?:$|[_.])", re.IGNORECASE)
_PLAIN = (
    "generator",
    "generator_lora",
    "model",
    "state_dict",
    "module",
    "network",
    "model_state_dict",
    "params",
    "weights",
)
_BESIDE = re.compile(r"optim|sched|scaler", re.IGNORECASE)
_DEPTH = 4

ALONE = "tensor"
"""Name given to the tensor of a file that holds one tensor and no names."""


def select(content: Any, path: Path, entry: str | None) -> tuple[dict[str, Any], list[str]]:
    """The state dict inside ``content``, and what to tell the person about the choice.

    Averaged (EMA) weights come before the plain ones, since they are what models are published with; ``entry`` (names
    joined by ``/``) overrules that. A tensor that stands alone is called :data:`ALONE`.

    Raises:
        CheckpointError: there is no state dict, no such entry, or several of equal standing.
    """
    if isinstance(content, Tensor) and not entry:
        return {ALONE: content}, []
    if entry:
        for name in entry.split("/"):
            if not isinstance(content, Mapping) or name not in content:
                raise CheckpointError(f"{path} has no entry {name!r} (of #{entry}); it has {_entries(content)}")
            content = content[name]
        if not _is_state(content):
            raise CheckpointError(f"{path}: #{entry} holds no tensors by name; it has {_entries(content)}")
        return dict(content), []
    chosen: list[str] = []
    while len(chosen) < _DEPTH and isinstance(content, Mapping):
        name = _inner(content, path)
        if name is None:
            break
        chosen.append(name)
        beside, content = _entries(content), content[name]
    if not _is_state(content):
        raise CheckpointError(f"{path} holds no tensors by name, only {_entries(content)}; give a file of weights")
    if not chosen:
        return dict(content), []
    return dict(content), [
        f"{path.name}: took {'/'.join(chosen)!r} of {beside}; another is taken with {path.name}#name"
    ]


def _inner(content: Mapping[Any, Any], path: Path) -> str | None:
    """The entry to descend into, ``None`` to stay."""
    names = [name for name in content if isinstance(name, str) and not _BESIDE.search(name)]
    inside = [name for name in names if _holds_state(content[name], _DEPTH)]
    averaged = [name for name in inside if _EMA.search(name)]
    for names in (averaged, [name for name in _PLAIN if name in inside]):
        if names:
            return names[0]
    if _is_state(content) or not inside:
        return None
    if len(inside) > 1:
        raise CheckpointError(
            f"{path} holds several state dicts ({', '.join(inside[:8])}); say which: {path.name}#{inside[0]}"
        )
    return inside[0]


def _is_state(value: Any) -> bool:
    return isinstance(value, Mapping) and any(isinstance(k, str) and isinstance(v, Tensor) for k, v in value.items())


def _holds_state(value: Any, depth: int) -> bool:
    if _is_state(value):
        return True
    return (
        depth > 0
        and isinstance(value, Mapping)
        and any(isinstance(name, str) and _holds_state(inner, depth - 1) for name, inner in value.items())
    )


def _entries(content: Any) -> str:
    if not isinstance(content, Mapping):
        return f"a {type(content).__name__}"
    names = [str(name)[:60] for name in content]
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "") if names else "nothing"
