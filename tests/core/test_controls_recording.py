"""Files of controls: exact, readable after a kill, and strict about everything else."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashdreams.core import notices
from flashdreams.core.controls import (
    Control,
    ControlError,
    ControlSpec,
    ControlWriter,
    Frame,
    Intrinsics,
    Keys,
    Mouse,
    Pose,
    control_from_json,
    control_to_json,
    load_controls,
    read_controls,
    save_controls,
)

pytestmark = pytest.mark.ci_cpu

TAKES = ControlSpec(
    words=("up", "none"),
    number=(-1e9, 1e9),
    keys={"w": "up", "d": "right"},
    mouse=(1e9, 1e9),
    buttons=("left",),
    pose=True,
)
FINITE = st.floats(-1e9, 1e9)
POSES = st.builds(
    lambda angle, x, y, z, lens: Pose(
        [
            [math.cos(angle), -math.sin(angle), 0, x],
            [math.sin(angle), math.cos(angle), 0, y],
            [0, 0, 1, z],
            [0, 0, 0, 1],
        ],
        lens,
    ),
    st.floats(-4, 4), FINITE, FINITE, FINITE,
    st.none() | st.builds(Intrinsics, *[st.floats(0.1, 1e4)] * 4, *[st.integers(1, 10_000)] * 2),
)  # fmt: skip
CONTROLS = st.none() | st.builds(
    Control,
    keys=st.none() | st.sampled_from([Keys(), Keys("w"), Keys("d", "w")]),
    mouse=st.none() | st.builds(Mouse, st.floats(-99, 99), st.floats(-99, 99), st.sampled_from([(), ("left",)])),
    pose=st.none() | POSES,
    word=st.sampled_from([None, "up", "none"]),
    number=st.none() | FINITE,
)
ROW = [None, Control(keys=Keys("w", "d")), Control(mouse=Mouse(0.1, -2, ("left",)), word="up"), Control(keys=Keys()),
       Control(pose=Pose(np.eye(4), Intrinsics(1, 2, 3, 4, 5, 6)), number=0.1)]  # fmt: skip


@settings(deadline=None)
@given(row=st.lists(CONTROLS, max_size=6))
def test_what_is_saved_is_loaded_to_the_last_bit(row, tmp_path_factory) -> None:
    path = tmp_path_factory.mktemp("controls") / "a.jsonl"
    save_controls(path, row, fps=29.97, model="some-model", takes=TAKES)
    recording = load_controls(path)
    assert (recording.fps, recording.model) == (29.97, "some-model")
    assert recording.controls == [control if control and control.said else None for control in row]
    assert recording.takes["keys"] == {"w": "up", "d": "right"}
    assert read_controls(str(path), TAKES) == recording.controls
    assert [control_from_json(json.loads(json.dumps(control_to_json(control)))) for control in recording.controls] == (
        recording.controls
    )


@pytest.fixture
def file(tmp_path) -> Path:
    notices.reset()
    path = tmp_path / "a.jsonl"
    save_controls(path, ROW, fps=16, model="m", takes=TAKES)
    return path


def test_the_format_is_one_object_a_line(file) -> None:
    header, *lines = map(json.loads, file.read_text().splitlines())
    assert header["format"] == "flashdreams-controls-1" and header["fps"] == 16.0 and header["model"] == "m"
    assert header["takes"]["words"] == ["up", "none"]
    assert lines[0] == {"frame": 0} and lines[1] == {"frame": 1, "keys": ["w", "d"]}
    assert lines[2] == {"frame": 2, "mouse": {"dx": 0.1, "dy": -2.0, "buttons": ["left"]}, "word": "up"}


def test_a_file_cut_anywhere_is_readable_up_to_the_last_whole_line(file, capsys) -> None:
    whole = file.read_bytes()
    header = whole.index(b"\n") + 1
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        notices.reset()
        if length < header - 1:
            with pytest.raises(ControlError, match="line 1"):
                load_controls(file)
            continue
        lines = whole[header:length].split(b"\n")
        complete = len(lines) - 1 + lines[-1].endswith(b"}") * (whole[length : length + 1] == b"\n")
        assert load_controls(file).controls == ROW[:complete]
        assert ("cut short" in capsys.readouterr().err) == (complete < len(lines) and lines[-1] != b"")


@pytest.mark.parametrize(
    ("line", "text", "said"),
    [
        (1, "", "line 1 is not valid JSON"),
        (1, "{}", "line 1: format is None; expected 'flashdreams-controls-1'"),
        (1, '{"format": "flashdreams-controls-2"}', "line 1: format"),
        (1, '{"format": "flashdreams-controls-1", "fps": 0, "model": "m", "takes": {}}', "line 1: fps is 0"),
        (1, '{"format": "flashdreams-controls-1", "fps": true, "model": "m", "takes": {}}', "fps is True"),
        (1, '{"format": "flashdreams-controls-1", "fps": 16, "model": 3, "takes": {}}', "line 1: .*model"),
        (3, '{"frame": 1, "keys": ["w"]', "line 3 is not valid JSON"),
        (3, "", "line 3 is not valid JSON"),
        (3, "[]", r"line 3: line is \[\]; expected an object"),
        (3, "\xff", "line 3 is not valid JSON"),
        (3, '{"frame": 2}', "line 3: frame is 2; expected 1"),
        (3, '{"frame": true}', "line 3: frame is True"),
        (3, '{"frame": 1.0}', "line 3: frame is 1.0"),
        (3, '{"keys": ["w"]}', "line 3: frame is None"),
        (3, '{"frame": 1, "key": ["w"]}', "line 3: 'key' is no part of a control"),
        (3, '{"frame": 1, "keys": "w"}', "line 3: keys is 'w'; expected a list"),
        (3, '{"frame": 1, "keys": [1]}', "line 3: key 1 is no name"),
        (3, '{"frame": 1, "keys": ["\\ud800"]}', "line 3: key"),
        (3, '{"frame": 1, "mouse": {"dx": NaN}}', "line 3 is not valid JSON: NaN"),
        (3, '{"frame": 1, "mouse": {"dx": 1e999}}', "line 3: mouse dx"),
        (3, '{"frame": 1, "mouse": {"dz": 1}}', "line 3: mouse has 'dz'"),
        (3, '{"frame": 1, "mouse": {"buttons": {}}}', "line 3: buttons"),
        (3, '{"frame": 1, "pose": {}}', "line 3: pose matrix is None"),
        (3, '{"frame": 1, "pose": {"matrix": [[1]]}}', "line 3: pose has 1 rows"),
        (3, '{"frame": 1, "pose": {"matrix": [["1", 0, 0, 0]]}}', "line 3: a number of the pose is '1'"),
        (3, '{"frame": 1, "word": 3}', "line 3: 'word' is no part"),
        (3, '{"frame": 1, "number": "3"}', "line 3: number of a control"),
        (3, '{"frame": 1, "word": ' + "[" * 50_000, "line 3"),
        (3, '{"frame": 1, "number": ' + "1" * 10_000 + "}", "line 3"),
        (3, "x" * 200_000, "line 3 is longer than"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_damage_is_named_with_its_line(file, line, text, said) -> None:
    lines = file.read_bytes().splitlines()
    lines[line - 1] = text.encode("latin-1")
    file.write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(ControlError, match=said) as error:
        load_controls(file)
    assert str(file) in str(error.value) and len(str(error.value)) < 500


def test_a_thousand_damaged_files_are_read_or_refused_with_a_line(file, capsys) -> None:
    whole = file.read_bytes()
    draw = random.Random(0)
    read, refused = 0, []
    for _ in range(1000):
        data = bytearray(whole)
        kind = draw.choice(["cut", "random", "bytes", "line", "swap", "text"])
        if kind == "cut":
            data = data[: draw.randrange(len(data))]
        elif kind == "random":
            data = bytearray(draw.randbytes(draw.randrange(400)))
        elif kind == "bytes":
            for _ in range(draw.randint(1, 8)):
                data[draw.randrange(len(data))] = draw.randrange(256)
        elif kind == "text":  # of JSON's own alphabet, which gets further than noise
            for _ in range(draw.randint(1, 4)):
                data[draw.randrange(len(data))] = draw.choice(b'{}[]",:0123456789eE.-truefalsnN\n ')
        else:
            lines = whole.splitlines(keepends=True)
            i, j = draw.randrange(len(lines)), draw.randrange(len(lines))
            lines[i], lines[j] = (lines[j], lines[i]) if kind == "swap" else (b"", lines[j])
            data = bytearray(b"".join(lines))
        file.write_bytes(data)
        try:
            row = load_controls(file).controls
            assert all(control is None or isinstance(control, Control) for control in row)
            read += 1
        except ControlError as error:
            refused.append(str(error))
    capsys.readouterr()
    assert all(f"{file}, line " in message for message in refused)
    assert min(read, len(refused)) > 50, "neither the good nor the bad ones are all there is"


def test_what_cannot_be_read_at_all_is_named(tmp_path) -> None:
    (tmp_path / "empty.jsonl").touch()
    for name, said in (("none.jsonl", "No such file"), (".", "directory"), ("empty.jsonl", "line 1: format is None")):
        with pytest.raises(ControlError, match=said):
            load_controls(tmp_path / name)


def test_a_recording_of_a_resumed_rollout_begins_later(tmp_path) -> None:
    with ControlWriter(tmp_path / "new" / "a.jsonl", fps=16, model="m", takes=TAKES) as writer:
        writer.write(9, [ROW[1]])
        writer.write(10, [ROW[2]])
    assert load_controls(tmp_path / "new" / "a.jsonl").controls == [None] * 9 + ROW[1:3]
    text = (tmp_path / "new" / "a.jsonl").read_text()
    for frame in ("-1", "99999999999999", "10.5"):
        (tmp_path / "b.jsonl").write_text(text.replace('"frame": 9', f'"frame": {frame}'))
        with pytest.raises(ControlError, match=f"line 2: frame is {frame}"):
            load_controls(tmp_path / "b.jsonl")


def test_what_is_written_is_in_the_file_before_it_is_closed(tmp_path) -> None:
    writer = ControlWriter(tmp_path / "a.jsonl", fps=16, model="m", takes=TAKES)
    writer.write(0, ROW)
    assert load_controls(tmp_path / "a.jsonl").controls == ROW
    writer.close()


def test_pixels_and_places_that_cannot_be_written_are_refused(tmp_path) -> None:
    with pytest.raises(ControlError, match="keep the video file itself"):
        ControlWriter(tmp_path / "a.jsonl", fps=16, model="m", takes=ControlSpec(frame=True))
    with pytest.raises(ControlError, match="pixels"):
        control_to_json(Control(frame=Frame(np.zeros((1, 1, 3), np.uint8))))
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(ControlError, match=r"cannot be written to .*folder\.jsonl"):
        ControlWriter(tmp_path / "folder.jsonl", fps=16, model="m", takes=TAKES)
    assert not (tmp_path / "a.jsonl").exists()


def test_a_full_disk_is_named() -> None:
    with pytest.raises(ControlError, match="cannot be written to /dev/full: No space left"):
        ControlWriter("/dev/full", fps=16, model="m", takes=TAKES)


def test_a_recording_that_another_model_cannot_take_is_refused_by_frame(file) -> None:
    with pytest.raises(ControlError, match=r"a\.jsonl, frame 1: key 'd' is not known; this model takes the keys w"):
        read_controls(str(file), ControlSpec(keys={"w": "up"}))


def test_nothing_invalid_is_saved(tmp_path) -> None:
    with pytest.raises(ControlError, match="'q'"):
        save_controls(tmp_path / "a.jsonl", [Keys("w"), Keys("q")], fps=16, takes=TAKES)
    assert not (tmp_path / "a.jsonl").exists()
