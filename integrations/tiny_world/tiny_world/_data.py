"""The procedural world: scenes, motion, captions and anti-aliased rendering, all from a seed.

Frames are 128x128 RGB at 16 fps. A scene is one coloured shape on one background; its motion comes
from the caption until an action takes over. Positions are pixel coordinates (x right, y down).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np

from tiny_world._words import ACTIONS, BACKGROUNDS, COLOURS, MOTIONS, SHAPES

SIZE = 128
FPS = 16
RADIUS = 18.0
SPEED = 3.0
LOW, HIGH = 22.0, 104.0
STRIPE = 16
STRIPE_GAIN = 0.09
_PATCH = 50

COLOUR_RGB = np.array(
    [[0.90, 0.13, 0.13], [0.15, 0.80, 0.25], [0.20, 0.38, 0.97], [0.95, 0.87, 0.15],
     [0.72, 0.20, 0.88], [0.15, 0.86, 0.90], [0.98, 0.52, 0.08], [0.96, 0.96, 0.96]], np.float32)  # fmt: skip
BACKGROUND_RGB = np.array(
    [[0.04, 0.04, 0.04], [0.42, 0.42, 0.42], [0.07, 0.09, 0.36],
     [0.06, 0.30, 0.13], [0.36, 0.06, 0.09], [0.40, 0.27, 0.14]], np.float32)  # fmt: skip
DIRECTION = np.array([[0, 0], [-1, 0], [1, 0], [0, -1], [0, 1]], np.float32)
"""Unit displacement (x, y) of each action id; the text motions 0..4 share it."""

Split = Literal["train", "heldout", "all"]


@cache
def combinations(split: Split) -> tuple[tuple[int, int, int], ...]:
    """(colour, shape, background) ids; a tenth, chosen by hash, is held out of training."""
    every = [(c, s, b) for c in range(len(COLOURS)) for s in range(len(SHAPES)) for b in range(len(BACKGROUNDS))]
    if split == "all":
        return tuple(every)
    ranked = sorted(every, key=lambda combo: hashlib.blake2b(repr(combo).encode(), digest_size=8).digest())
    count = round(len(every) / 10)
    return tuple(sorted(ranked[:count] if split == "heldout" else ranked[count:]))


@dataclass(frozen=True)
class Clips:
    """``n`` clips of ``frames`` frames before rendering.

    colour, shape, background, motion: int ``[n]``; striped: bool ``[n]``;
    actions: int ``[n, frames]`` (action of frame f moves f-1 to f; frame 0 has none);
    centres: float32 ``[n, frames, 2]``; captions: ``n`` strings.
    """

    colour: np.ndarray
    shape: np.ndarray
    background: np.ndarray
    striped: np.ndarray
    motion: np.ndarray
    actions: np.ndarray
    centres: np.ndarray
    captions: list[str]

    def __len__(self) -> int:
        return len(self.captions)


def sample_clips(seed: int, n: int, frames: int, split: Split = "train", with_actions: bool = True) -> Clips:
    """Draw clips; the same arguments always give the same clips."""
    rng = np.random.default_rng([seed, n, frames, {"train": 0, "heldout": 1, "all": 2}[split]])
    combos = np.array(combinations(split))[rng.integers(0, len(combinations(split)), n)]
    colour, shape, background = combos.T
    striped = rng.random(n) < 0.3
    motion = rng.integers(0, len(MOTIONS), n)
    start = rng.uniform(LOW, HIGH, (n, 2)).astype(np.float32)
    velocity = initial_velocity(motion, rng)
    actions = sample_actions(rng, n, frames) if with_actions else np.zeros((n, frames), np.int64)
    captions = [
        caption(rng, COLOURS[c], SHAPES[s], BACKGROUNDS[b], bool(st), MOTIONS[m])
        for c, s, b, st, m in zip(colour, shape, background, striped, motion, strict=True)
    ]
    return Clips(colour, shape, background, striped, motion, actions, simulate(start, velocity, actions), captions)


def initial_velocity(motion: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Velocity in px/frame ``[n, 2]`` of each motion word; "bounce" is a random diagonal."""
    diagonal = 0.75 * SPEED * rng.choice(np.array([-1.0, 1.0], np.float32), (len(motion), 2))
    straight = SPEED * DIRECTION[np.minimum(motion, 4)]
    return np.where((motion == MOTIONS.index("bounce"))[:, None], diagonal, straight).astype(np.float32)


def sample_actions(rng: np.random.Generator, n: int, frames: int) -> np.ndarray:
    """Scripts of held keys: 30 % empty, otherwise segments of 3-16 frames from frame 1-8 on."""
    actions = np.zeros((n, frames), np.int64)
    for row in actions:
        if rng.random() < 0.3:
            continue
        frame = int(rng.integers(1, 9))
        while frame < frames:
            length = int(rng.integers(3, 17))
            row[frame : frame + length] = 0 if rng.random() < 0.25 else rng.integers(1, len(ACTIONS))
            frame += length
    return actions


def simulate(start: np.ndarray, velocity: np.ndarray, actions: np.ndarray) -> np.ndarray:
    """Centres ``[n, frames, 2]``: an action sets the velocity and stops at a wall, no action coasts and reflects."""
    position, velocity = start.copy(), velocity.copy()
    centres = np.empty((*actions.shape, 2), np.float32)
    centres[:, 0] = position
    for f in range(1, actions.shape[1]):
        acted = (actions[:, f] > 0)[:, None]
        velocity = np.where(acted, SPEED * DIRECTION[actions[:, f]], velocity)
        moved = position + velocity
        outside = (moved < LOW) | (moved > HIGH)
        reflected = np.where(moved < LOW, 2 * LOW - moved, np.where(moved > HIGH, 2 * HIGH - moved, moved))
        position = np.where(acted, np.clip(moved, LOW, HIGH), reflected)
        velocity = np.where(~acted & outside, -velocity, velocity)
        centres[:, f] = position
    return centres


def caption(rng: np.random.Generator, colour: str, shape: str, background: str, striped: bool, motion: str) -> str:
    """One of three sentence forms in the closed vocabulary."""
    form = rng.random()
    pattern = "striped " if striped else ("plain " if rng.random() < 0.15 else "")
    if motion == "still":
        verb, participle = "stays still", "still"
    elif motion == "bounce":
        verb, participle = "bounces around", "bouncing around"
    else:
        verb, participle = f"moves {motion}", f"moving {motion}"
    if form < 0.6:
        article = "the" if rng.random() < 0.1 else "a"
        return f"{article} {colour} {shape} {verb} on a {background} {pattern}background"
    if form < 0.8:
        return f"{colour} {shape} {participle}, {background} {pattern}background"
    return f"a {background} {pattern}background with a {colour} {shape} {participle}"


def signed_distance(shape: int, dx: np.ndarray, dy: np.ndarray, radius: float = RADIUS) -> np.ndarray:
    """Distance in px to the outline of a shape centred at 0 (negative inside)."""
    ax, ay, r = np.abs(dx), np.abs(dy), radius
    match SHAPES[shape]:
        case "circle":
            return np.hypot(dx, dy) - r
        case "square":
            return np.maximum(ax, ay) - 0.886 * r
        case "triangle":
            return np.maximum(dy, 0.8660254 * ax - 0.5 * dy) - 0.62 * r
        case "diamond":
            return (ax + ay - 1.253 * r) * 0.70710678
        case "cross":
            wide = np.maximum(ax - 1.1 * r, ay - 0.38 * r)
            tall = np.maximum(ax - 0.38 * r, ay - 1.1 * r)
            return np.minimum(wide, tall)
        case "ring":
            return np.abs(np.hypot(dx, dy) - 0.78 * r) - 0.3 * r
    raise ValueError(f"unknown shape id {shape}")


def render_background(background: int, striped: bool) -> np.ndarray:
    """float32 ``[128, 128, 3]`` in [0, 1]."""
    plane = np.broadcast_to(BACKGROUND_RGB[background], (SIZE, SIZE, 3)).copy()
    if striped:
        plane += STRIPE_GAIN * ((np.arange(SIZE) // STRIPE) % 2)[None, :, None].astype(np.float32)
    return plane


def render(clips: Clips) -> np.ndarray:
    """Frames uint8 ``[n, frames, 128, 128, 3]``."""
    n, frames = clips.actions.shape
    margin = _PATCH
    video = np.empty((n, frames, SIZE + 2 * margin, SIZE + 2 * margin, 3), np.uint8)
    offset = np.arange(_PATCH, dtype=np.float32) - _PATCH // 2
    for i in range(n):
        plane = np.pad(render_background(int(clips.background[i]), bool(clips.striped[i])),
                       ((margin, margin), (margin, margin), (0, 0)), mode="wrap")  # fmt: skip
        video[i] = (plane * 255 + 0.5).astype(np.uint8)
        whole = np.floor(clips.centres[i]).astype(int)
        part = clips.centres[i] - whole
        dx = offset[None, None, :] - part[:, 0, None, None]
        dy = offset[None, :, None] - part[:, 1, None, None]
        alpha = np.clip(0.5 - signed_distance(int(clips.shape[i]), dx, dy), 0, 1)[..., None]
        colour = COLOUR_RGB[clips.colour[i]] * 255
        for f in range(frames):
            x, y = whole[f] - _PATCH // 2 + margin
            box = np.s_[y : y + _PATCH, x : x + _PATCH]
            video[i, f][box] = (plane[box] * 255 * (1 - alpha[f]) + colour * alpha[f] + 0.5).astype(np.uint8)
    return video[:, :, margin:-margin, margin:-margin]


def actions_by_latent(actions: np.ndarray) -> np.ndarray:
    """Actions per frame ``[n, 1+4k]`` -> per latent ``[n, 1+k, 4]``; latent 0 repeats frame 0."""
    n, frames = actions.shape
    if frames % 4 != 1:
        raise ValueError(f"{frames} frames; a clip has 1 + 4k frames")
    first = np.repeat(actions[:, :1], 4, axis=1)
    return np.concatenate([first, actions[:, 1:]], axis=1).reshape(n, -1, 4)
