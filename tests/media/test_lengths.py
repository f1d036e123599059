"""A length in chunks, frames or seconds becomes whole chunks; FIELD_NOTES row 30 (15 frames on a 4k + 1 model)."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashdreams.core.lengths import MAX_FRAMES, resolve_length

pytestmark = pytest.mark.ci_cpu


def causal(chunk_frames: int):
    """A causal VAE: the first latent frame is one pixel frame, each later one four."""
    return lambda n: 0 if n == 0 else 1 + 4 * (n * chunk_frames - 1)


def resolve(frames_until=causal(1), fps=Fraction(16), default=65, **length):
    return resolve_length(fps=fps, frames_until=frames_until, default_num_frames=default, **length)


@given(st.integers(1, 3000), st.integers(1, 6))
def test_frames_take_the_fewest_chunks_that_hold_them(frames, chunk_frames):
    until = causal(chunk_frames)
    chunks = resolve(until, num_frames=frames)
    assert until(chunks) >= frames > until(chunks - 1)


def test_rounding_up_is_said_once(capsys):
    assert resolve(num_frames=15) == 5
    assert resolve(num_frames=15) == 5
    assert capsys.readouterr().err == "num_frames 15 -> 17 frames in 5 chunks, as chunks are made whole\n"


def test_a_length_that_fits_is_not_mentioned(capsys):
    assert resolve(num_frames=17) == 5
    assert resolve(num_chunk=3) == 3
    assert resolve() == 17
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("seconds", "fps", "frames"),
    [
        (1, "16", 16),
        (4.1, "10", 41),  # 4.1 * 10 is 41.0 in decimals, a little more in binary
        (1.001, "30000/1001", 30),
        (0.001, "16", 1),
        (2.5, "23.976", 60),
    ],
)
def test_seconds_are_counted_exactly(seconds, fps, frames):
    assert resolve(lambda n: n, fps=Fraction(fps), duration=seconds) == frames


def test_rounded_seconds_are_said_with_their_frames(capsys):
    assert resolve(duration=2.0) == 9
    assert capsys.readouterr().err == "duration 2.0 s = 32 frames -> 33 frames in 9 chunks, as chunks are made whole\n"


@pytest.mark.parametrize("name", ["num_chunk", "num_frames", "duration"])
@pytest.mark.parametrize("value", [0, -1])
def test_zero_and_negative_lengths_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        resolve(**{name: value})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_durations_that_are_no_number_of_seconds_are_refused(value):
    with pytest.raises(ValueError, match=f"duration is {value}"):
        resolve(duration=value)


def test_two_lengths_at_once_are_refused():
    with pytest.raises(ValueError, match=r"num_frames 5 and duration 1.0 were given together"):
        resolve(num_frames=5, duration=1.0)


def test_a_long_length_is_accepted_up_to_where_frame_positions_end():
    assert resolve(lambda n: n, num_frames=MAX_FRAMES) == MAX_FRAMES
    assert resolve(lambda n: n, num_chunk=10**12) == 10**12
    for length in ({"num_frames": MAX_FRAMES + 1}, {"num_chunk": 10**400}, {"duration": 1e300}):
        with pytest.raises(ValueError, match=f"more than {MAX_FRAMES} frames"):
            resolve(lambda n: n, **length)
