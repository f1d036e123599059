"""Which of several transforms fits a checkpoint, decided on its keys and shapes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from flashdreams.core.checkpoint.errors import CheckpointError
from flashdreams.core.checkpoint.plan import Planner, Step, Transform, plan_steps
from flashdreams.core.checkpoint.report import Match, compare

Candidate = Transform | Planner | None


def choose_transform(
    wanted: Mapping[str, Tensor],
    header: dict[str, Tensor],
    candidates: Mapping[str, Candidate],
    *,
    allow_missing: Iterable[str] = (),
    dtype: torch.dtype = torch.float32,
) -> tuple[str, list[Step], Match]:
    """The candidate that makes the module's tensors of the checkpoint's, or else the one that comes nearest.

    Args:
        wanted: the module's state dict.
        header: the checkpoint's tensors on the meta device.
        candidates: by name, the preferred one first; ``None`` leaves the keys as they are.

    Returns:
        Its name, what it makes, and how that compares (the caller looks at ``ok``).

    Raises:
        CheckpointError: two of them fit and give different results; or none can be applied at all.
    """
    allow_missing = tuple(allow_missing)
    fitting: list[tuple[str, list[Step], Match]] = []
    nearest: tuple[str, list[Step], Match] | None = None
    failure: CheckpointError | None = None
    for name, candidate in candidates.items():
        try:
            steps = plan_steps(header, candidate)
        except CheckpointError as error:
            failure = failure or error
            continue
        match = compare(wanted, {step.target: step.meta for step in steps}, allow_missing, dtype)
        if match.ok:
            fitting.append((name, steps, match))
        elif nearest is None or _distance(match) < _distance(nearest[2]):
            nearest = name, steps, match
    if fitting:
        first = fitting[0]
        other = next((each for each in fitting[1:] if _content(each[1]) != _content(first[1])), None)
        if other is not None:
            raise CheckpointError(f"both {first[0]} and {other[0]} fit this checkpoint, and differ; say which to use")
        return first
    if nearest is None:
        raise failure or CheckpointError("there is no transform to choose from")
    return nearest


def _distance(match: Match) -> int:
    return len(match.missing) + len(match.unexpected) + len(match.shapes) + len(match.formats)


def _content(steps: list[Step]) -> dict[str, tuple[str, ...]]:
    return {step.target: step.sources for step in steps}
