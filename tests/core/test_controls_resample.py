"""From moments to frames: nothing is lost, nothing counts twice, however the frames are asked for."""

from __future__ import annotations

import math
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashdreams.core.controls import (
    Control,
    ControlError,
    ControlSpec,
    ControlTimeline,
    Frame,
    Intrinsics,
    Keys,
    LiveControls,
    Mouse,
    Picture,
    Pose,
    by_latent,
    interpolate,
)
from flashdreams.core.controls import timeline as timeline_module

pytestmark = pytest.mark.ci_cpu

FRAMES = 24
RATES = st.sampled_from([16.0, 24.0, 29.97, 30.0])
MOMENTS = st.floats(0, 1.0)
KEYS = st.lists(st.sampled_from("wasd"), max_size=3, unique=True).map(lambda names: Keys(*names))
MOTION = st.integers(-64, 64).map(lambda step: step / 64)
"""Sums of these are exact."""


def rotation(axis: np.ndarray, angle: float) -> np.ndarray:
    """Rodrigues' formula."""
    x, y, z = axis / np.linalg.norm(axis)
    cross = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    return np.eye(3) + math.sin(angle) * cross + (1 - math.cos(angle)) * cross @ cross


def pose(axis: np.ndarray, angle: float, place: np.ndarray, lens: Intrinsics | None = None) -> Pose:
    matrix = np.eye(4)
    matrix[:3, :3], matrix[:3, 3] = rotation(axis, angle), place
    return Pose(matrix, lens)


@st.composite
def poses(draw) -> Pose:
    axis = np.array([draw(st.integers(-8, 8)) for _ in range(2)] + [draw(st.integers(1, 8))], dtype=float)
    return pose(axis, draw(st.floats(-7, 7)), np.array([draw(st.floats(-5, 5)) for _ in range(3)]))


EVENTS = st.lists(
    st.tuples(
        MOMENTS,
        KEYS
        | poses()
        | st.builds(Mouse, MOTION, MOTION, st.sampled_from([(), ("left",), ("left", "right")]))
        | st.integers(0, 3).map(lambda value: Frame(np.full((1, 1, 3), value, np.uint8)))
        | st.sampled_from(["up", "down"])
        | st.builds(lambda keys, dx: Control(keys=keys, mouse=Mouse(dx)), KEYS, MOTION),
    ),
    max_size=12,
)


def timeline(fps: float, events) -> ControlTimeline:
    made = ControlTimeline(fps)
    for moment, control in events:
        made.add(moment, control)
    return made


@settings(deadline=None)
@given(fps=RATES, events=EVENTS, cuts=st.lists(st.integers(0, FRAMES), max_size=5))
def test_any_division_into_chunks_gives_the_same_frames(fps, events, cuts) -> None:
    whole = timeline(fps, events).frames(0, FRAMES)
    edges = [0, *sorted(cuts), FRAMES]
    for ask in (timeline(fps, events).frames, timeline(fps, events)):  # the second forgets what it handed out
        parts = [control for a, b in zip(edges, edges[1:], strict=False) for control in ask(a, b)]
        assert parts == whole


@settings(deadline=None)
@given(fps=RATES, events=EVENTS)
def test_the_order_in_which_events_of_different_moments_are_added_does_not_matter(fps, events) -> None:
    events = [
        (moment, control) for moment, control in {round(moment, 5): control for moment, control in events}.items()
    ]
    assert timeline(fps, events).frames(0, FRAMES) == timeline(fps, reversed(events)).frames(0, FRAMES)


@given(fps=RATES, states=st.lists(st.tuples(MOMENTS, KEYS), max_size=12))
def test_no_press_is_lost_and_no_key_is_held_longer_than_it_was(fps, states) -> None:
    states = sorted(states, key=lambda state: state[0])
    row = [control.keys or () if control else () for control in timeline(fps, states).frames(0, 40)]
    frame_of = [math.floor(round(moment * fps, 6)) for moment, _ in states]
    before = Keys()
    for (_, state), frame in zip(states, frame_of, strict=True):
        for key in state:
            if key not in before:
                assert key in row[frame]
        before = state
    for frame, held in enumerate(row):
        alive = [state for state, at in zip(states, frame_of, strict=True) if at == frame]
        earlier = [state for state, at in zip(states, frame_of, strict=True) if at < frame]
        possible = {key for _, state in alive + earlier[-1:] for key in state}
        assert set(held) <= possible
        if not alive:
            assert set(held) == set(earlier[-1][1] if earlier else ())


def test_a_press_shorter_than_a_frame_is_held_for_that_frame() -> None:
    events = [
        (0.11, Keys("d")),
        (0.21, Keys("d", "w")),
        (0.22, Keys("d")),
        (0.31, Keys()),
        (0.32, Keys("d")),
        (0.33, Keys()),
    ]
    held = [control.keys for control in timeline(10, events).frames(1, 5)]
    assert held == [Keys("d"), Keys("d", "w"), Keys("d"), Keys()]


@given(fps=RATES, events=st.lists(st.tuples(MOMENTS, MOTION, MOTION)), cuts=st.lists(st.integers(0, 31), max_size=6))
def test_all_motion_is_used_once(fps, events, cuts) -> None:
    made = timeline(fps, [(moment, Mouse(dx, dy)) for moment, dx, dy in events])
    edges = [0, *sorted(cuts), 31]
    row = [control for a, b in zip(edges, edges[1:], strict=False) for control in made(a, b)]
    assert sum(control.mouse.dx for control in row if control) == sum(dx for _, dx, _ in events)
    assert sum(control.mouse.dy for control in row if control) == sum(dy for _, _, dy in events)


def test_buttons_are_held_while_the_mouse_moves_and_while_it_does_not() -> None:
    events = [
        (0.0, Mouse(buttons=("left",))),
        (0.15, Mouse(0.5, 0, ("left",))),
        (0.25, Mouse(1)),
        (0.31, Mouse(0, 0, ("right",))),
        (0.32, Mouse()),
    ]
    assert [control.mouse for control in timeline(10, events).frames(0, 5)] == [
        Mouse(0, 0, ("left",)), Mouse(0.5, 0, ("left",)), Mouse(1), Mouse(0, 0, ("right",)), Mouse()
    ]  # fmt: skip


def test_kinds_do_not_end_each_other() -> None:
    picture = Picture(np.zeros((2, 2, 3), np.uint8))
    events = [(0.0, Keys("w")), (0.1, Mouse(1)), (0.2, "up"), (0.3, picture), (0.4, 0.5), (0.5, Keys())]
    row = timeline(10, events).frames(0, 7)
    assert row[0] == Control(keys=Keys("w")) and row[1] == Control(keys=Keys("w"), mouse=Mouse(1))
    assert row[6] == Control(keys=Keys(), mouse=Mouse(), word="up", picture=picture, number=0.5)
    assert timeline(10, [(0.5, Keys("w"))]).frames(3, 6) == [None, None, Control(keys=Keys("w"))]


def test_moments_on_the_edge_of_a_frame_belong_to_it_whatever_the_rounding() -> None:
    for fps in (10, 24, 29.97):
        for frame in range(500):
            (control,) = timeline(fps, [(frame * (1 / fps), Mouse(1))]).frames(frame, frame + 1)
            assert control.mouse.dx == 1


@settings(deadline=None)
@given(a=poses(), b=poses(), share=st.floats(0, 1))
def test_between_two_poses_lies_a_pose_on_the_shorter_arc(a, b, share) -> None:
    assert interpolate(a, b, 0) == a and interpolate(a, b, 1) == b
    middle, back = interpolate(a, b, share), interpolate(b, a, 1 - share)
    np.testing.assert_allclose(middle.matrix, back.matrix, atol=1e-6)
    place = np.array(a.translation) + share * (np.array(b.translation) - np.array(a.translation))
    np.testing.assert_allclose(middle.translation, place, atol=1e-9)
    turned = np.array(middle.rotation)
    np.testing.assert_allclose(turned @ turned.T, np.eye(3), atol=1e-9)

    def angle(p: Pose, q: Pose) -> float:
        return math.acos(np.clip((np.trace(np.array(p.rotation).T @ np.array(q.rotation)) - 1) / 2, -1, 1))

    assert angle(a, middle) == pytest.approx(share * angle(a, b), abs=1e-5)


@given(axis=st.tuples(st.integers(1, 8), st.integers(-8, 8)), start=st.floats(-7, 7), turn=st.floats(-3, 3))
def test_rotations_turn_at_constant_speed(axis, start, turn) -> None:
    about = np.array([*axis, 2.0])
    a, b = (pose(about, angle, np.zeros(3)) for angle in (start, start + turn))
    for share in (0.1, 0.5, 0.8):
        expected = rotation(about, start + share * turn)
        np.testing.assert_allclose(interpolate(a, b, share).rotation, expected, atol=1e-9)


def test_poses_are_sampled_where_the_frame_begins_and_hold_at_both_ends() -> None:
    lens, tele, other = (Intrinsics(f, f, 1, 1, w, 2) for f, w in ((100, 4), (300, 4), (200, 8)))
    axis = np.array([0.0, 1, 0])
    a, b, c = (
        pose(axis, 0, np.zeros(3), lens),
        pose(axis, 1, np.array([4.0, 0, 0]), tele),
        pose(axis, 1, np.zeros(3), other),
    )
    row = [control.pose for control in timeline(10, [(0.1, a), (0.5, b), (0.6, c)]).frames(0, 9)]
    assert row[0] is row[1] is a and row[5] is b and row[6] is row[8] is c
    np.testing.assert_allclose(row[2].matrix[0], [math.cos(0.25), 0, math.sin(0.25), 1.0], atol=1e-12)
    assert [p.intrinsics.fx for p in row[1:6]] == pytest.approx([100, 150, 200, 250, 300])
    assert interpolate(b, c, 0.4).intrinsics == tele and interpolate(b, c, 0.6).intrinsics == other


def test_the_nearest_video_frame_is_taken() -> None:
    dark, grey, light = (Frame(np.full((1, 1, 3), value, np.uint8)) for value in (0, 128, 255))
    row = [control.frame for control in timeline(10, [(0.1, dark), (0.24, grey), (0.5, light)]).frames(0, 7)]
    assert row == [dark, dark, grey, grey, light, light, light]
    assert timeline(1, [(0, dark), (2, light)]).frames(1, 2)[0].frame == dark


def test_controls_are_grouped_by_latent_frame() -> None:
    row = list(range(20))
    assert by_latent(row, 0, 3) == [[0], [1, 2, 3, 4], [5, 6, 7, 8]]
    assert by_latent(row, 1, 3) == by_latent(row[:8], 5, 7) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert by_latent(row, 0, 2, compression=8) == [[0], [1, 2, 3, 4, 5, 6, 7, 8]]
    assert by_latent(row, 2, 2) == [] and by_latent(row, 0, 2, compression=1) == [[0], [1]]
    with pytest.raises(ValueError, match="20 controls were given; latent frames 1 to 7 have 24"):
        by_latent(row, 1, 7)


def test_what_comes_too_late_counts_for_the_next_frame() -> None:
    made = ControlTimeline(10)
    made(0, 8)
    made.add(0.1, Keys("w"))
    made.add(0.2, Mouse(1))
    made.add(0.3, Mouse(2))
    first, second = made(8, 10)
    assert first == Control(keys=Keys("w"), mouse=Mouse(3)) and second == Control(keys=Keys("w"), mouse=Mouse())


def test_a_chunk_that_failed_is_asked_for_again() -> None:
    made = timeline(10, [(0.1, Mouse(1)), (0.3, Mouse(4)), (0.9, Mouse(2))])
    assert made(0, 8) == made(0, 8) and made(8, 10)[1].mouse.dx == 2


def test_a_flood_of_motion_in_one_frame_ends_no_rollout() -> None:
    assert timeline(10, [(0.0, Mouse(900_000, -1e6))] * 3).frames(0, 1)[0].mouse == Mouse(1e6, -1e6)


def test_an_endless_session_needs_no_more_memory() -> None:
    made = ControlTimeline(16)
    for chunk in range(300):
        for event in range(10):
            made.add((chunk + event / 10) / 4, Control(keys=Keys("w"), mouse=Mouse(1), pose=Pose(np.eye(4))))
        assert sum(control.mouse.dx for control in made(4 * chunk, 4 * chunk + 4)) == 10
        assert sum(map(len, made._tracks.values())) <= 3


def test_motion_is_added_up_before_it_is_slowed_down() -> None:
    made = ControlTimeline(10, ControlSpec(mouse=(0.1, 0.1)))
    for dx in (0.5, -0.45):
        made.add(0.0, Mouse(dx))
    assert made(0, 1)[0].mouse.dx == pytest.approx(0.05)


def test_what_the_model_does_not_take_is_refused_when_it_is_added(monkeypatch) -> None:
    takes = ControlSpec(keys={"w": "up"})
    for made in (ControlTimeline(16, takes), LiveControls(takes)):
        add = made.add if isinstance(made, LiveControls) else lambda control, made=made: made.add(0.0, control)
        with pytest.raises(ControlError, match="'q' is not known"):
            add(Keys("q"))
        add("W")
        assert made(0, 1) == [Control(keys=Keys("w"))]
    for moment in (-1, math.nan, math.inf, 1e300, "1", True, None):
        with pytest.raises(ControlError, match="time of a control"):
            ControlTimeline(16).add(moment, Keys())
    with pytest.raises(ControlError, match="fps"):
        ControlTimeline(0)


def test_events_that_nobody_reads_are_refused_in_the_end(monkeypatch) -> None:
    monkeypatch.setattr(timeline_module, "MAX_WAITING", 5)
    monkeypatch.setattr("flashdreams.core.controls.live.MAX_WAITING", 5)
    live, made = LiveControls(), ControlTimeline(16)
    for _ in range(5):
        live.add(Keys())
        made.add(0, Keys())
    with pytest.raises(ControlError, match=r"5 controls wait.*skip"):
        live.add(Keys())
    with pytest.raises(ControlError, match="5 controls wait"):
        made.add(0, Keys())
    live.skip()
    live.add(Keys())
    monkeypatch.setattr("flashdreams.core.controls.live.MAX_PIXELS_WAITING", 2)
    live(0, 1)
    for _ in range(2):
        live.add(Frame(np.zeros((1, 1, 3), np.uint8)))
    with pytest.raises(ControlError, match="2 controls wait"):
        live.add(Frame(np.zeros((1, 1, 3), np.uint8)))
    live.add(Keys())


class Clock:
    """Seconds as a test wants them."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("seconds", [0.05, 0.25, 5.0])
def test_live_controls_go_into_the_next_chunk_however_long_the_last_one_took(seconds) -> None:
    clock = Clock()
    live = LiveControls(clock=clock)
    assert live(0, 4) == [None] * 4
    clock.now += seconds / 2
    live.add(Keys("d"))
    live.add(Mouse(0.5))
    clock.now += seconds / 2
    live.add(Mouse(0.25))
    row = live(4, 8)
    assert [control.keys for control in row] == [Keys("d")] * 4, "a held key holds from the first frame on"
    assert [control.mouse.dx if control.mouse else 0 for control in row] == [0, 0, 0.5, 0.25]
    clock.now += seconds / 2
    live.add(Mouse(1))
    clock.now += seconds / 2
    row = live(8, 12)
    assert [control.mouse.dx for control in row] == [0, 0, 1, 0] and row[3].keys == Keys("d")


def test_live_poses_move_over_the_chunk_and_arrive_at_its_last_frame() -> None:
    clock = Clock()
    live = LiveControls(clock=clock)
    axis = np.array([0.0, 0, 1])
    live.add(pose(axis, 0, np.zeros(3)))
    live(0, 1)
    clock.now += 1
    live.add(pose(axis, 0, np.array([4.0, 0, 0])))
    assert [control.pose.translation[0] for control in live(1, 5)] == pytest.approx([1, 2, 3, 4])


def test_after_a_pause_only_what_is_held_counts() -> None:
    clock = Clock()
    live = LiveControls(clock=clock)
    live.add(Control(keys=Keys("w"), mouse=Mouse(3, 0, ("left",))))
    live.add(Keys("w", "d"))
    live.add(Keys("w"))
    clock.now += 60
    live.skip()
    assert live(0, 1) == [Control(keys=Keys("w"), mouse=Mouse(0, 0, ("left",)))]


@settings(deadline=None, max_examples=50)
@given(
    steps=st.lists(st.tuples(st.floats(0, 0.3), st.sampled_from("wasd"), MOTION), max_size=30),
    reads=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 5)), max_size=10),
)
def test_live_no_tap_and_no_motion_is_lost(steps, reads) -> None:
    clock = Clock()
    live = LiveControls(clock=clock)
    row: list[Control | None] = []
    for number, (pause, key, dx) in enumerate(steps):
        clock.now += pause
        live.add(Keys(key))
        live.add(Mouse(dx))
        live.add(Keys())
        for frames in [frames for after, frames in reads if after == number]:
            row += live(len(row), len(row) + frames)
    row += live(len(row), len(row) + 3)
    assert sum(control.mouse.dx for control in row if control and control.mouse) == sum(dx for _, _, dx in steps)
    tapped = {key for control in row if control and control.keys for key in control.keys}
    assert tapped == {key for _, key, _ in steps}
    if row and steps:
        assert not row[-1].keys, "nothing stays held"


def test_threads_may_add_while_the_model_reads() -> None:
    live = LiveControls()
    threads = [
        threading.Thread(target=lambda: [live.add(Control(keys=Keys("w"), mouse=Mouse(1))) for _ in range(500)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    row: list[Control | None] = []
    while any(thread.is_alive() for thread in threads):
        row += live(len(row), len(row) + 4)
    row += live(len(row), len(row) + 4)
    assert sum(control.mouse.dx for control in row if control and control.mouse) == 2000
