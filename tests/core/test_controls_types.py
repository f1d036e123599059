"""What a control is, and how a model says which ones it takes."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from flashdreams.core import notices
from flashdreams.core.controls import (
    Control,
    ControlError,
    ControlSpec,
    Frame,
    Intrinsics,
    Keys,
    Mouse,
    Picture,
    Pose,
    parse_script,
    read_controls,
)

pytestmark = pytest.mark.ci_cpu

GAME = ControlSpec(keys={"w": "forward", "a": "left", "space": "jump"}, mouse=(0.1, 0.2), buttons=("left",))
WORDS = ControlSpec(words=("none", "right", "up"), keys={"w": "up", "d": "right"})
CAMERA = ControlSpec(pose=True, intrinsics=True)
LENS = Intrinsics(500, 500, 416, 240, 832, 480)
PIXELS = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)


def test_importing_controls_loads_neither_torch_nor_numpy() -> None:
    code = "import sys, flashdreams.core.controls; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_keys_keep_the_order_of_pressing_and_take_names_of_a_browser() -> None:
    keys = Keys("D", "ArrowLeft", " ", "d")
    assert keys.held == ("d", "left", "space") and "left" in keys and list(keys) == ["d", "left", "space"]
    assert Keys("d").press("w").held == ("d", "w") and Keys("d", "w").release("D") == Keys("w")
    assert not Keys() and Keys("w", "d") != Keys("d", "w")


@pytest.mark.parametrize("name", ["", "  ", "x" * 33, "a\nb", "\ud800", None, 3, ["w"]])
def test_a_name_that_is_none_is_refused(name) -> None:
    with pytest.raises(ControlError, match="no name"):
        Keys(name)


@pytest.mark.parametrize("value", [math.nan, math.inf, "1", True, None, 10**400])
def test_motion_is_a_finite_number(value) -> None:
    with pytest.raises(ControlError, match="mouse dx is .*finite number"):
        Mouse(value)


def test_absurd_motion_is_refused() -> None:
    with pytest.raises(ControlError, match=r"mouse dy is -1e\+07; expected widths or heights of the picture"):
        Mouse(0, -1e7)


def test_poses_come_in_any_form_and_compare_by_value() -> None:
    rows = [[0, -1, 0, 1.5], [1, 0, 0, 2], [0, 0, 1, -3], [0, 0, 0, 1]]
    pose = Pose(rows)
    assert pose == Pose(np.array(rows)) == Pose(torch.tensor(rows)) == Pose(tuple(map(tuple, rows)))
    assert pose.translation == (1.5, 2.0, -3.0) and pose.rotation == ((0, -1, 0), (1, 0, 0), (0, 0, 1))
    assert hash(pose) == hash(Pose(rows)) and all(type(value) is float for row in pose.matrix for value in row)


@pytest.mark.parametrize(
    ("matrix", "said"),
    [
        (np.eye(3), "3 rows"),
        (np.eye(4)[:3], "3 rows"),
        ([], "0 rows"),
        ("pose", "pose"),
        (3, "4 rows of 4"),
        (np.full((4, 4), np.nan), "finite"),
        (np.eye(4) * 2, "last row"),
        (np.array([[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [1, 2, 3, 1.0]]), "columns"),
        (np.diag([2, 2, 2, 1.0]), "scale"),
        (np.diag([1, 1, -1, 1.0]), "mirror"),
    ],
)
def test_a_matrix_that_is_no_pose_is_refused(matrix, said) -> None:
    with pytest.raises(ControlError, match=said):
        Pose(matrix)


def test_intrinsics_belong_to_a_picture_of_some_size() -> None:
    assert (LENS.width, LENS.height, LENS.fx) == (832, 480, 500.0)
    with pytest.raises(ControlError, match="fx is -1"):
        Intrinsics(-1, 1, 1, 1, 832, 480)
    with pytest.raises(ControlError, match="width is 0"):
        Intrinsics(1, 1, 1, 1, 0, 480)


def test_pictures_are_uint8_rgb_and_not_copied() -> None:
    frame = Frame(PIXELS)
    assert np.shares_memory(frame.pixels, PIXELS) and PIXELS.flags.writeable and not frame.pixels.flags.writeable
    assert frame == Frame(torch.from_numpy(PIXELS)) and hash(frame) == hash(Frame(PIXELS.copy()))
    assert frame != Frame(PIXELS + 1) and frame != Picture(PIXELS) and frame != Frame(PIXELS.reshape(4, 2, 3))
    for bad in (PIXELS.astype(float), PIXELS[0], PIXELS[..., :2], PIXELS[:0], [[[1, 2, 3]]], "x.png"):
        with pytest.raises(ControlError, match="expected RGB pixels"):
            Frame(bad)


def test_a_control_holds_several_things_at_once() -> None:
    control = Control(keys=Keys("w"), mouse=Mouse(0.1), number=1)
    assert control.said == ("keys", "mouse", "number") and control.number == 1.0
    assert Control.of(Keys("w")) == Control(keys=Keys("w")) and Control.of(0.5) == Control(number=0.5)
    assert Control.of("right") == Control(word="right") and Control.of(Frame(PIXELS)).said == ("frame",)
    assert Control.of(control) is control and Control.of(None) is None and Control.of(Control()) is None
    for bad in (object(), [Keys("w")], {"keys": ["w"]}, True):
        with pytest.raises(ControlError, match=r"expected Keys, .*, Control, a word or a number"):
            Control.of(bad)
    with pytest.raises(ControlError, match=r"keys of a control is 'w'; expected a Keys"):
        Control(keys="w")


def test_the_spec_gives_encoders_one_form() -> None:
    assert WORDS.validate("right") == WORDS.validate(" RIGHT ") == Control(word="right")
    assert WORDS.validate("D") == WORDS.validate(Keys("d")) == Control(keys=Keys("d"))
    assert WORDS.validate("w+d") == Control(keys=Keys("w", "d"))
    assert WORDS.validate(None) is WORDS.validate(Control()) is None
    assert WORDS.validate(Keys()) == Control(keys=Keys())
    assert ControlSpec(number=(0, 1)).validate("0.25") == Control(number=0.25)
    posed = Pose(np.eye(4), LENS)
    assert CAMERA.validate(posed) == Control(pose=posed)
    both = Control(keys=Keys("w"), mouse=Mouse(0.05, 0, ("left",)))
    assert GAME.validate(both) == both == GAME.validate(GAME.validate(both))


@pytest.mark.parametrize(
    ("spec", "control", "said"),
    [
        (WORDS, "jump", r"control 'jump' is not known; this model takes the words none, right, up; the keys w, d"),
        (WORDS, "", "control '' is not known"),
        (WORDS, "w+", "not known"),
        (WORDS, Control(word="jump"), "'jump'"),
        (WORDS, Keys("d", "q"), "key 'q' is not known; this model takes"),
        (WORDS, Mouse(0.1), "says mouse; this model takes the words"),
        (WORDS, 0.3, "says number"),
        (GAME, Mouse(buttons=("right",)), "mouse button 'right'"),
        (GAME, Pose(np.eye(4)), "says pose; this model takes the keys w, a, space; mouse motion; the mouse buttons"),
        (CAMERA, Pose(np.eye(4)), r"no intrinsics.*Pose\(matrix, Intrinsics\("),
        (CAMERA, Frame(PIXELS), "says frame; this model takes camera poses with intrinsics"),
        (ControlSpec(number=(-1, 1)), 1.5, "is 1.5; expected a number from -1 to 1"),
        (ControlSpec(number=(-1, 1)), "nan", "not known; this model takes a number"),
        (ControlSpec(picture=True, frame=True), "w", "takes pictures; video frames"),
        (ControlSpec(), "w", "takes no controls"),
    ],
)
def test_what_a_model_does_not_take_is_refused_with_what_it_does(spec, control, said) -> None:
    with pytest.raises(ControlError, match=said):
        spec.validate(control)


def test_motion_beyond_what_the_model_knows_is_slowed_and_said_once(capsys) -> None:
    notices.reset()
    assert GAME.validate(Mouse(3.0, -0.1, ("left",))) == Control(mouse=Mouse(0.1, -0.1, ("left",)))
    assert GAME.validate(Mouse(0.0, -9.0)) == Control(mouse=Mouse(0.0, -0.2))
    assert capsys.readouterr().err.count("slowed down") == 1


def test_a_spec_that_nothing_could_fit_is_refused() -> None:
    for bad, said in (({"keys": {"ArrowLeft": "left"}}, "'left' here"), ({"words": ("Up",)}, "lower case")):
        with pytest.raises(ControlError, match=said):
            ControlSpec(**bad)


def test_a_spec_is_data() -> None:
    assert not ControlSpec() and GAME and GAME.to_dict() == {
        "keys": {"w": "forward", "a": "left", "space": "jump"}, "mouse": (0.1, 0.2), "buttons": ("left",)
    }  # fmt: skip


def test_scripts_hold_words_and_keys_for_frames() -> None:
    right, none, both = Control(word="right"), Control(word="none"), Control(keys=Keys("w", "d"))
    assert parse_script("right:2 none:1, w+d:1", WORDS) == [right, right, none, both]
    assert parse_script("right", WORDS) == [right] * 16
    assert parse_script("w:1 none:2; space:1", GAME) == [
        Control(keys=Keys("w")),
        None,
        None,
        Control(keys=Keys("space")),
    ]
    assert parse_script("0.5:1,-1:1", ControlSpec(number=(-1, 1))) == [Control(number=0.5), Control(number=-1)]


@pytest.mark.parametrize("text", ["jump", "w:0", "w:-1", "w:x", "w:", "w:99999999999", "w:²", ":3", "", "w w: up"])
def test_bad_scripts_are_named(text) -> None:
    with pytest.raises(ControlError, match="control"):
        parse_script(text, WORDS)


def test_scripts_are_read_from_files(tmp_path) -> None:
    (tmp_path / "a.txt").write_text("right:1\nup:1\n")
    assert read_controls(str(tmp_path / "a.txt"), WORDS) == [Control(word="right"), Control(word="up")]
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe")
    (tmp_path / "c.txt").write_text("up " * 100_000)
    for name, said in (("b.txt", "cannot be read as text"), ("c.txt", "300000 bytes"), ("none.txt", "none.txt")):
        with pytest.raises(ControlError, match=said):
            read_controls(str(tmp_path / name), WORDS)
