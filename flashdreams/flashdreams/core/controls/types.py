"""What a person or a program says about one frame, as values. Neither torch nor numpy is imported here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

Matrix = tuple[tuple[float, float, float, float], ...]
MAX_NAME = 32
MAX_MOTION = 1e6
"""Widths or heights of the picture: far beyond any hand, and sums of it stay finite."""
ORTHONORMAL = 1e-2
"""How far the rows of a rotation may be from orthonormal: pose files are often written with few digits."""


class ControlError(ValueError):
    """A control that cannot be used. The message names it, what is understood, and what to do."""


@dataclass(frozen=True, init=False)
class Keys:
    """Keys that are held, in the order they were pressed, the latest last: ``Keys("w", "d")``; ``Keys()`` is none.

    Names are lower case. Those of a browser (``KeyboardEvent.key``) are taken as they come: ``"ArrowLeft"`` is
    ``"left"``, ``" "`` is ``"space"``.
    """

    held: tuple[str, ...]

    def __init__(self, *held: str) -> None:
        object.__setattr__(self, "held", tuple(dict.fromkeys(map(key_name, held))))

    def press(self, name: str) -> Keys:
        """These keys and one more."""
        return Keys(*self.held, name)

    def release(self, name: str) -> Keys:
        """These keys but one."""
        return Keys(*(key for key in self.held if key != key_name(name)))

    def __contains__(self, name: object) -> bool:
        return name in self.held

    def __iter__(self) -> Iterator[str]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)

    def __repr__(self) -> str:
        return f"Keys({', '.join(map(repr, self.held))})"


@dataclass(frozen=True)
class Mouse:
    """Motion since the frame before, in widths and heights of the picture, and the buttons that are held.

    ``dx`` is to the right and ``dy`` down: ``dx=0.5`` is half a picture to the right. Buttons are ``"left"``,
    ``"middle"`` and ``"right"``.
    """

    dx: float = 0.0
    dy: float = 0.0
    buttons: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("dx", "dy"):
            motion = _number(getattr(self, name), f"mouse {name}")
            if abs(motion) > MAX_MOTION:
                raise ControlError(f"mouse {name} is {motion:g}; expected widths or heights of the picture")
            object.__setattr__(self, name, motion)
        object.__setattr__(self, "buttons", Keys(*self.buttons).held)


@dataclass(frozen=True)
class Intrinsics:
    """Focal lengths and principal point in pixels of a picture of ``width`` x ``height``."""

    fx: float
    fy: float
    cx: float
    cy: float
    width: int
    height: int

    def __post_init__(self) -> None:
        for field in fields(self):
            value = _number(getattr(self, field.name), f"intrinsics {field.name}")
            if value <= 0 and field.name not in ("cx", "cy"):
                raise ControlError(f"intrinsics {field.name} is {value:g}; expected pixels above 0")
            object.__setattr__(self, field.name, int(value) if field.name in ("width", "height") else value)


@dataclass(frozen=True)
class Pose:
    """Where the camera is: camera-to-world, OpenCV axes (x right, y down, z forward), of any world.

    ``matrix`` is 4 rows of 4 numbers, given as nested sequences, an array or a tensor. ``intrinsics`` say what the
    camera sees; models that need them say so.
    """

    matrix: Matrix
    intrinsics: Intrinsics | None = None

    def __post_init__(self) -> None:
        given: Any = self.matrix
        rows = given.tolist() if hasattr(given, "tolist") else given
        try:
            matrix = tuple(tuple(_number(value, "a number of the pose") for value in row) for row in rows)
        except TypeError:
            raise ControlError(f"pose is {given!r:.80}; expected 4 rows of 4 numbers, camera-to-world") from None
        if [len(row) for row in matrix] != [4] * 4:
            shape = f"rows of {sorted({len(row) for row in matrix})}" if matrix else "nothing"
            raise ControlError(f"pose has {len(matrix)} rows ({shape}); expected 4 rows of 4 numbers, camera-to-world")
        if any(abs(value - wanted) > 1e-6 for value, wanted in zip(matrix[3], (0, 0, 0, 1), strict=True)):
            raise ControlError(f"last row of the pose is {matrix[3]}; expected (0, 0, 0, 1): rows may be columns here")
        rotation = [row[:3] for row in matrix[:3]]
        for i, row in enumerate(rotation):
            products = [_dot(row, other) for other in rotation]
            if any(abs(product - (i == j)) > ORTHONORMAL for j, product in enumerate(products)):
                raise ControlError(
                    f"rotation of the pose is {rotation}, which is none: its rows are not orthonormal; remove the scale"
                )
        if _dot(_cross(rotation[0], rotation[1]), rotation[2]) < 0:
            raise ControlError(
                f"rotation of the pose is {rotation}, a mirror image; convert it to OpenCV axes (x right, y down, z "
                "forward) by flipping two axes, not one"
            )
        object.__setattr__(self, "matrix", matrix)

    @property
    def rotation(self) -> tuple[tuple[float, ...], ...]:
        """3 rows of 3."""
        return tuple(row[:3] for row in self.matrix[:3])

    @property
    def translation(self) -> tuple[float, float, float]:
        """Place of the camera in the world."""
        x, y, z = (row[3] for row in self.matrix[:3])
        return x, y, z


@dataclass(frozen=True, eq=False)
class Picture:
    """An image that holds until another is given: uint8 RGB ``[H, W, 3]``. The pixels are not copied."""

    pixels: np.ndarray

    def __post_init__(self) -> None:
        given: Any = self.pixels
        pixels = given.numpy() if hasattr(given, "numpy") else given
        shape, dtype = tuple(getattr(pixels, "shape", ())), str(getattr(pixels, "dtype", type(pixels).__name__))
        if dtype != "uint8" or len(shape) != 3 or shape[2] != 3 or 0 in shape:
            raise ControlError(
                f"{type(self).__name__.lower()} is {dtype} {list(shape)}; expected RGB pixels, uint8 [H, W, 3]"
            )
        view = pixels.view()
        view.flags.writeable = False
        object.__setattr__(self, "pixels", view)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self.pixels.shape == other.pixels.shape and self.pixels.tobytes() == other.pixels.tobytes()

    def __hash__(self) -> int:
        return hash((self.pixels.shape, self.pixels.tobytes()))


class Frame(Picture):
    """A frame of a video that runs beside the one that is made."""


@dataclass(frozen=True, kw_only=True)
class Control:
    """All that is said about one frame; ``None`` where nothing is. Encoders get one of these, or ``None``, per frame.

    ``word`` and ``number`` are what a model understands besides, such as ``"right"`` or a brightness.
    """

    keys: Keys | None = None
    mouse: Mouse | None = None
    pose: Pose | None = None
    picture: Picture | None = None
    frame: Frame | None = None
    word: str | None = None
    number: float | None = None

    def __post_init__(self) -> None:
        for name, kind in KINDS.items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise ControlError(f"{name} of a control is {value!r:.80}; expected {_article(kind.__name__)}")
        if self.number is not None:
            object.__setattr__(self, "number", _number(self.number, "number of a control"))

    @property
    def said(self) -> tuple[str, ...]:
        """Names of the fields that say something."""
        return tuple(field.name for field in fields(self) if getattr(self, field.name) is not None)

    @classmethod
    def of(cls, value: Any) -> Control | None:
        """``Keys("w")``, ``Mouse(...)``, ... alone, a word or a number as a control; ``None`` where nothing is said."""
        if value is None:
            return None
        if isinstance(value, Control):
            return value if value.said else None
        for name, kind in KINDS.items():
            if type(value) is kind:
                return cls(**{name: value})
        if isinstance(value, str):
            return cls(word=value)
        if isinstance(value, bool) or not hasattr(value, "__float__"):
            raise ControlError(
                f"control is {value!r:.80}; expected {', '.join(kind.__name__ for kind in KINDS.values())}, Control, "
                "a word or a number"
            )
        return cls(number=value)


KINDS: dict[str, type] = {"keys": Keys, "mouse": Mouse, "pose": Pose, "picture": Picture, "frame": Frame}


def key_name(name: str) -> str:
    """A key's name as it is used here: lower case, ``"left"`` for ``"ArrowLeft"``, ``"space"`` for ``" "``."""
    known = "space" if name == " " else name.strip().lower().removeprefix("arrow") if isinstance(name, str) else ""
    if not 0 < len(known) <= MAX_NAME or not known.isprintable():
        raise ControlError(f"key {name!r:.80} is no name; expected a few letters, such as 'w', 'left' or 'space'")
    return known


def _number(value: Any, name: str) -> float:
    try:
        number = float("nan") if isinstance(value, (bool, str)) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ControlError(f"{name} is {value!r:.80}; expected a finite number")
    return number


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def _cross(a: Sequence[float], b: Sequence[float]) -> tuple[float, float, float]:
    return a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0]


def _article(name: str) -> str:
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"
