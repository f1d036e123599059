"""Held keys to camera poses."""

from __future__ import annotations

import math
from collections.abc import Container

import torch
from torch import Tensor

STEEPEST = math.sin(math.radians(80))
"""Sine of how far up and down the camera looks."""


def move(pose: Tensor, held: Container[str], level: Tensor, distance: float, angle: float) -> Tensor:
    """The pose one frame later, float64 ``[4, 4]``.

    Left and right turn about the vertical of ``level``, so that the horizon stays level; up and down tilt, within 80
    degrees; then w, a, s, d move along the camera's own axes, two at once no faster than one.

    Args:
        level: a pose that stands upright: the first one.
        distance: of a frame's move.
        angle: of a frame's turn, in radians.
    """
    rotation, upright = pose[:3, :3], level[:3, :3]
    yaw = angle * (("right" in held) - ("left" in held))
    rotation = upright @ _turn(yaw, 0, 2) @ upright.T @ rotation
    tilted = rotation @ _turn(angle * (("down" in held) - ("up" in held)), 1, 2)
    steepness = (tilted[:, 2] @ upright[:, 1]).abs()
    if steepness <= max(STEEPEST, (rotation[:, 2] @ upright[:, 1]).abs()):
        rotation = tilted
    way = torch.tensor([("d" in held) - ("a" in held), 0, ("w" in held) - ("s" in held)], dtype=torch.float64)
    length = way.norm().clamp(min=1)
    out = pose.clone()
    out[:3, :3] = rotation
    out[:3, 3] += distance * rotation @ (way / length)
    return out


def _turn(angle: float, first: int, second: int) -> Tensor:
    """Rotation that takes axis ``second`` towards axis ``first`` by ``angle``."""
    out = torch.eye(3, dtype=torch.float64)
    out[first, first] = out[second, second] = math.cos(angle)
    out[first, second], out[second, first] = math.sin(angle), -math.sin(angle)
    return out
