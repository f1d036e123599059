"""Keys that drive the camera, and named ways to hold them. Loads no torch."""

from __future__ import annotations

from typing import Literal

KEYS = {
    "w": "forward",
    "a": "to the left",
    "s": "back",
    "d": "to the right",
    "left": "turn left",
    "right": "turn right",
    "up": "look up",
    "down": "look down",
}
"""Every key, and where it takes the camera."""
MOVES = "w", "a", "s", "d"
"""Those the action model is told of, in its order."""

Trajectory = Literal[
    "forward", "back", "strafe-left", "strafe-right", "pan-left", "pan-right", "tilt-up", "tilt-down",
    "orbit-left", "orbit-right",
]  # fmt: skip
TRAJECTORIES: dict[Trajectory, tuple[str, ...]] = {
    "forward": ("w",),
    "back": ("s",),
    "strafe-left": ("a",),
    "strafe-right": ("d",),
    "pan-left": ("left",),
    "pan-right": ("right",),
    "tilt-up": ("up",),
    "tilt-down": ("down",),
    # To go left while turning right is to go around what lies ahead.
    "orbit-left": ("a", "right"),
    "orbit-right": ("d", "left"),
}
"""The keys that are held throughout."""
