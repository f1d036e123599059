"""Lengths a person may ask for (chunks, frames or seconds), turned into a number of chunks."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

from flashdreams.core.notices import say_once

MAX_FRAMES = 2**53
"""Positions of frames are float64 (RoPE): beyond this, neighbouring frames would share one."""


def resolve_length(
    *,
    num_chunk: int | None = None,
    num_frames: int | None = None,
    duration: float | None = None,
    default_num_frames: int,
    fps: Fraction,
    frames_until: Callable[[int], int],
    unit: str = "chunk",
) -> int:
    """Number of chunks of a run whose length is given in at most one of three ways.

    Frames and seconds are rounded up to whole chunks; a length that had to change is said once.

    Args:
        num_chunk: length in chunks.
        num_frames: length in frames.
        duration: length in seconds, at ``fps`` frames a second.
        default_num_frames: length in frames when none of the three is given.
        frames_until: pixel frames of the first n chunks; grows with n, ``frames_until(0) == 0``.
        unit: what is counted, for messages.

    Raises:
        ValueError: more than one length is given, or one is not positive, not finite, or beyond ``MAX_FRAMES``.
    """
    given = {"num_chunk": num_chunk, "num_frames": num_frames, "duration": duration}
    given = {name: value for name, value in given.items() if value is not None}
    if len(given) > 1:
        pairs = " and ".join(f"{name} {value}" for name, value in given.items())
        raise ValueError(f"{pairs} were given together; give only one of num_chunk, num_frames and duration")
    name, value = next(iter(given.items()), ("num_frames", default_num_frames))
    if not 0 < value < math.inf:
        raise ValueError(f"{name} is {value}; expected a positive number")
    if name == "num_chunk":
        if value > MAX_FRAMES or frames_until(int(value)) > MAX_FRAMES:
            raise ValueError(f"num_chunk is {value}, which makes more than {MAX_FRAMES} frames; give fewer chunks")
        return int(value)

    # Through its decimal text, 4.1 seconds at 10 fps are 41 frames; as a binary fraction they would be 42.
    frames = math.ceil(Fraction(str(value)) * fps) if name == "duration" else int(value)
    if frames > MAX_FRAMES:
        raise ValueError(f"{name} is {value}, which makes more than {MAX_FRAMES} frames; give a shorter length")
    chunks = chunks_for(frames, frames_until)
    made = frames_until(chunks)
    if made != frames:
        asked = f"{name} {value}" if name == "num_frames" else f"{name} {value} s = {_count(frames, 'frame')}"
        say_once(f"{asked} -> {_count(made, 'frame')} in {_count(chunks, unit)}, as {unit}s are made whole")
    return chunks


def chunks_for(frames: int, frames_until: Callable[[int], int]) -> int:
    """Smallest n with ``frames_until(n) >= frames``, by doubling and bisection."""
    high = 1
    while frames_until(high) < frames:
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        if frames_until(middle) < frames:
            low = middle
        else:
            high = middle
    return high


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
