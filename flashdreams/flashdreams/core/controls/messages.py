"""Controls as JSON: one line of a recording, one message between programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from flashdreams.core.controls.types import Control, ControlError, Intrinsics, Keys, Mouse, Pose


def control_to_json(control: Control | None) -> dict[str, Any]:
    """What ``control`` says, as JSON has it. Also the form for messages between programs."""
    result: dict[str, Any] = {}
    for kind in control.said if control else ():
        value = getattr(control, kind)
        if kind in ("picture", "frame"):
            raise ControlError(
                f"{kind} of a control is pixels, which JSON does not hold; send or keep the image itself"
            )
        result[kind] = (
            list(value) if isinstance(value, Keys) else value if kind in ("word", "number") else asdict(value)
        )
    if (pose := result.get("pose")) and pose["intrinsics"] is None:
        del pose["intrinsics"]
    return result


def control_from_json(value: Any) -> Control | None:
    """The control that :func:`control_to_json` wrote.

    Raises:
        ControlError: a field or a value is none of a control.
    """
    given = as_object(value, "control")
    parts: dict[str, Any] = {}
    for kind, item in given.items():
        if kind == "keys":
            parts[kind] = Keys(*_list(item, "keys"))
        elif kind == "mouse":
            mouse = _fields(item, "mouse", ("dx", "dy", "buttons"))
            buttons = tuple(_list(mouse.get("buttons", []), "buttons"))
            parts[kind] = Mouse(mouse.get("dx", 0.0), mouse.get("dy", 0.0), buttons)
        elif kind == "pose":
            pose = _fields(item, "pose", ("matrix", "intrinsics"))
            inner = pose.get("intrinsics")
            matrix: Any = [_list(row, "pose row") for row in _list(pose.get("matrix"), "pose matrix")]
            parts[kind] = Pose(matrix, None if inner is None else _intrinsics(inner))
        elif (kind == "word" and isinstance(item, str)) or kind == "number":
            parts[kind] = item
        else:
            raise ControlError(f"{kind!r:.40} is no part of a control; expected keys, mouse, pose, word or number")
    return Control.of(Control(**parts))


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        raise ControlError(f"{what} is {value!r:.40}; expected a list")
    return list(value)


def as_object(value: Any, what: str) -> dict[str, Any]:
    """``value`` where it is a JSON object; an error that names it otherwise."""
    if not isinstance(value, Mapping):
        raise ControlError(f"{what} is {value!r:.40}; expected an object")
    return dict(value)


def _fields(value: Any, what: str, names: tuple[str, ...]) -> dict[str, Any]:
    given = as_object(value, what)
    if unknown := [name for name in given if name not in names]:
        raise ControlError(f"{what} has {unknown[0]!r:.40}; expected {', '.join(names)}")
    return given


def _intrinsics(value: Any) -> Intrinsics:
    names = ("fx", "fy", "cx", "cy", "width", "height")
    given = _fields(value, "intrinsics", names)
    if missing := [name for name in names if name not in given]:
        raise ControlError(f"intrinsics lack {', '.join(missing)}")
    return Intrinsics(**given)
