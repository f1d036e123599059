"""From moments to frames: what events that came at any time mean for each frame of a video.

Frame ``f`` lasts from position ``f`` to ``f + 1``. Each function takes the events of one kind in the order of their
positions, and gives its value for every frame from ``start`` to ``stop``: a pure function of the events, so that any
division into chunks gives the same frames.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeVar

from flashdreams.core.controls.poses import interpolate
from flashdreams.core.controls.types import MAX_MOTION, Frame, Keys, Mouse, Pose

T = TypeVar("T")
Events = Sequence[tuple[float, T]]
"""Position in frames, and what was said there."""


def position(time: float, fps: float) -> float:
    """Where a moment lies, in frames. Rounding errors do not move an event to the frame before: 0.7 s at 10 frames a
    second is frame 7."""
    exact = time * fps
    return float(round(exact)) if abs(exact - round(exact)) < 1e-6 else exact


def held(events: Events[T], start: int, stop: int) -> list[T | None]:
    """What was said last, in the frame or before it."""
    latest, row = None, []
    for before, said in _by_frame(events, start, stop):
        latest = [*before, *said][-1] if before or said else latest
        row.append(latest)
    return row


def keys(events: Events[Keys], start: int, stop: int) -> list[Keys | None]:
    """The keys held at the end of the frame, and those pressed within it, however short."""
    state: Keys | None = None
    row: list[Keys | None] = []
    for before, said in _by_frame(events, start, stop):
        state = before[-1] if before else state
        row.append(_pressed(state, said) if said else state)
        state = said[-1] if said else state
    return row


def mouse(events: Events[Mouse], start: int, stop: int) -> list[Mouse | None]:
    """All motion within the frame, added up, and the buttons as keys."""
    state: Mouse | None = None
    row: list[Mouse | None] = []
    for before, said in _by_frame(events, start, stop):
        state = before[-1] if before else state
        held = Keys(*state.buttons) if state else None
        buttons = _pressed(held, [Keys(*event.buttons) for event in said]) if said else held
        row.append(
            Mouse(_sum([e.dx for e in said]), _sum([e.dy for e in said]), buttons.held) if buttons is not None else None
        )
        state = said[-1] if said else state
    return row


def poses(events: Events[Pose], start: int, stop: int) -> list[Pose | None]:
    """The pose at the moment the frame begins, between the two events around it; beyond the ends, the nearest."""
    row: list[Pose | None] = []
    for frame in range(start, stop):
        after = bisect_right(events, frame, key=lambda event: event[0])
        if 0 < after < len(events):
            (begin, a), (end, b) = events[after - 1], events[after]
            row.append(interpolate(a, b, (frame - begin) / (end - begin)))
        else:
            row.append(events[min(after, len(events) - 1)][1] if events else None)
    return row


def frames(events: Events[Frame], start: int, stop: int) -> list[Frame | None]:
    """The video frame nearest to the moment the frame begins; of two at the same distance, the earlier."""
    row: list[Frame | None] = []
    for frame in range(start, stop):
        after = bisect_right(events, frame, key=lambda event: event[0])
        near = events[max(0, after - 1) : after + 1]
        row.append(min(near, key=lambda event: abs(event[0] - frame))[1] if near else None)
    return row


def by_latent(row: Sequence[T], start: int, stop: int, compression: int = 4) -> list[list[T]]:
    """The controls of a chunk's pixel frames, latent frame by latent frame.

    Args:
        row: one control per pixel frame, and those of frames looked ahead at, which are left out.
        start, stop: latent frames of the chunk. The first of a stream has one pixel frame, every other
            ``compression``.
    """
    edges = [max(0, compression * (latent - 1) + 1) for latent in range(start, stop + 1)]
    if edges[-1] - edges[0] > len(row):
        raise ValueError(
            f"{len(row)} controls were given; latent frames {start} to {stop} have {edges[-1] - edges[0]} pixel frames"
        )
    return [list(row[a - edges[0] : b - edges[0]]) for a, b in pairwise(edges)]


def _by_frame(events: Events[T], start: int, stop: int) -> list[tuple[list[T], list[T]]]:
    """For each frame, what was said before it and not for a frame listed, and what was said in it."""
    said: list[list[T]] = [[] for _ in range(start, stop)]
    before: list[T] = []
    for where, value in events:
        if where < start:
            before = [value]  # of all that came before, only the last one counts
        elif where < stop:
            said[math.floor(where) - start].append(value)
    return [(before if not i else [], values) for i, values in enumerate(said)]


def _sum(motions: Sequence[float]) -> float:
    """All of it, as far as a control can say so much: no flood of events may end a rollout."""
    return max(-MAX_MOTION, min(MAX_MOTION, math.fsum(motions)))


def _pressed(state: Keys | None, said: Sequence[Any]) -> Keys:
    """Keys of a frame that began in ``state``, in the order of pressing."""
    order = dict.fromkeys(state or ())
    pressed: set[str] = set()
    for before, after in pairwise([state or Keys(), *said]):
        pressed |= {name for name in after if name not in before}
        order |= dict.fromkeys(after)
    return Keys(*(name for name in order if name in pressed or name in said[-1]))
