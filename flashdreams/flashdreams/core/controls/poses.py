"""Camera poses between two others. In float64, without numpy."""

from __future__ import annotations

import math
from dataclasses import replace

from flashdreams.core.controls.types import Intrinsics, Pose

Quaternion = tuple[float, float, float, float]
"""w, x, y, z; of length 1."""


def interpolate(a: Pose, b: Pose, share: float) -> Pose:
    """The pose at ``share`` of the way: ``a`` itself at 0, ``b`` itself at 1. Places on a line, rotations by SLERP."""
    if share <= 0 or (a.matrix == b.matrix and a.intrinsics == b.intrinsics):
        return a
    if share >= 1:
        return b
    rotation = _matrix(slerp(quaternion(a), quaternion(b), share))
    place = [_between(x, y, share) for x, y in zip(a.translation, b.translation, strict=True)]
    rows = [(*row, along) for row, along in zip(rotation, place, strict=True)]
    return Pose((*rows, (0.0, 0.0, 0.0, 1.0)), _lens(a.intrinsics, b.intrinsics, share))


def slerp(a: Quaternion, b: Quaternion, share: float) -> Quaternion:
    """Along the shorter of the two arcs, at constant speed."""
    cosine = sum(x * y for x, y in zip(a, b, strict=True))
    sign = -1.0 if cosine < 0 else 1.0
    angle = math.acos(min(1.0, abs(cosine)))
    if angle < 1e-6:  # the two formulas agree to float64 here, and this one does not divide by 0
        first, second = 1 - share, share
    else:
        first, second = (math.sin(part * angle) / math.sin(angle) for part in (1 - share, share))
    w, x, y, z = (first * p + second * sign * q for p, q in zip(a, b, strict=True))
    return _unit(w, x, y, z)


def quaternion(pose: Pose) -> Quaternion:
    """Rotation of ``pose``. Of the four formulas the one that divides by the largest number is used (Shepperd)."""
    (a, b, c), (d, e, f), (g, h, i) = pose.rotation
    candidates = [
        (1 + a + e + i, h - f, c - g, d - b),
        (h - f, 1 + a - e - i, b + d, c + g),
        (c - g, b + d, 1 - a + e - i, f + h),
        (d - b, c + g, f + h, 1 - a - e + i),
    ]
    return _unit(*max(enumerate(candidates), key=lambda pair: pair[1][pair[0]])[1])


def _matrix(q: Quaternion) -> list[tuple[float, float, float]]:
    w, x, y, z = q
    return [
        (1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)),
        (2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)),
        (2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)),
    ]


def _lens(a: Intrinsics | None, b: Intrinsics | None, share: float) -> Intrinsics | None:
    """Between two lenses for the same picture size; else that of the nearer pose."""
    if a is None or b is None or (a.width, a.height) != (b.width, b.height):
        return a if share < 0.5 else b
    names = ("fx", "fy", "cx", "cy")
    return replace(a, **{name: _between(getattr(a, name), getattr(b, name), share) for name in names})


def _between(a: float, b: float, share: float) -> float:
    return a if a == b else (1 - share) * a + share * b


def _unit(w: float, x: float, y: float, z: float) -> Quaternion:
    length = math.sqrt(w * w + x * x + y * y + z * z)
    return w / length, x / length, y / length, z / length
