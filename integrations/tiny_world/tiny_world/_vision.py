"""Plain vision code that reads a frame back: background, colour, shape and place. No learning.

It inverts the renderer: the nearest known colours per pixel, then the template that best overlaps the mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from tiny_world._data import BACKGROUND_RGB, COLOUR_RGB, SIZE, STRIPE, STRIPE_GAIN, signed_distance
from tiny_world._words import SHAPES

MINIMUM_AREA = 120
"""Pixels; the smallest shape (cross) covers about 830."""


@dataclass(frozen=True)
class Reading:
    """What one frame shows; ``colour`` and ``shape`` are -1 and ``centre`` is NaN where no shape is found.

    centre: (x, y) of the best template, px; iou: overlap of mask and template; area: px of the mask.
    """

    background: int
    striped: bool
    colour: int
    shape: int
    centre: tuple[float, float]
    iou: float
    area: int


@cache
def _templates() -> tuple[np.ndarray, np.ndarray]:
    """Soft masks ``[S, 64, 64]`` of the shapes at the centre of a window, and their centres of mass ``[S, 2]``."""
    grid = np.arange(64, dtype=np.float32) - 32
    masks = np.stack([np.clip(0.5 - signed_distance(s, grid[None], grid[:, None]), 0, 1) for s in range(len(SHAPES))])
    mass = np.stack([(masks * grid).sum((1, 2)), (masks * grid[:, None]).sum((1, 2))]) / masks.sum((1, 2))
    return masks, mass.T


def read_frame(frame: np.ndarray) -> Reading:
    """Read one frame, uint8 ``[128, 128, 3]``."""
    image = frame.astype(np.float32) / 255
    background, striped, plane = _read_background(image)
    distance = np.linalg.norm(image - plane, axis=-1)
    mask = _largest_component(distance > 0.22)
    area = int(mask.sum())
    if area < MINIMUM_AREA:
        return Reading(background, striped, -1, -1, (float("nan"), float("nan")), 0.0, area)
    core = mask & (distance > np.median(distance[mask]) * 0.8)
    mean = np.median(image[core], axis=0)
    colour = int(np.linalg.norm(COLOUR_RGB - mean, axis=-1).argmin())
    contrast = np.linalg.norm(COLOUR_RGB[colour] - plane, axis=-1)
    soft = np.where(_dilate(mask, 2), np.clip(distance / np.maximum(contrast, 1e-3), 0, 1), 0)
    shape, centre, iou = _match(soft)
    return Reading(background, striped, colour, shape, centre, iou, area)


def _read_background(image: np.ndarray) -> tuple[int, bool, np.ndarray]:
    """Background id, striped or not, and the plane ``[128, 128, 3]``: the candidate that fits most pixels."""
    stripes = STRIPE_GAIN * ((np.arange(SIZE) // STRIPE) % 2)[None, :, None].astype(np.float32)
    best: tuple[float, int, bool, np.ndarray] | None = None
    for index, rgb in enumerate(BACKGROUND_RGB):
        for striped in (False, True):
            plane = np.broadcast_to(rgb + (stripes if striped else 0), image.shape)
            error = np.linalg.norm(image[::2, ::2] - plane[::2, ::2], axis=-1)
            score = float(np.minimum(error, 0.15).mean())
            if best is None or score < best[0]:
                best = (score, index, striped, plane)
    assert best is not None
    return best[1:]


def _dilate(mask: np.ndarray, steps: int) -> np.ndarray:
    for _ in range(steps):
        grown = mask.copy()
        grown[1:] |= mask[:-1]
        grown[:-1] |= mask[1:]
        grown[:, 1:] |= mask[:, :-1]
        grown[:, :-1] |= mask[:, 1:]
        mask = grown
    return mask


def _largest_component(mask: np.ndarray) -> np.ndarray:
    """The largest 4-connected region, by flooding label maxima until nothing changes."""
    labels = np.where(mask, np.arange(1, mask.size + 1).reshape(mask.shape), 0)
    while True:
        grown = labels.copy()
        for axis in (0, 1):
            for backwards in (False, True):
                view = np.flip(grown, axis) if backwards else grown
                view = view if axis == 0 else view.T
                for row in range(1, len(view)):
                    np.maximum(view[row], view[row - 1] * (view[row] > 0), out=view[row])
        if np.array_equal(grown, labels):
            break
        labels = grown
    if not mask.any():
        return mask
    counts = np.bincount(labels[mask])
    return labels == counts.argmax() if counts.size else mask


def _match(soft: np.ndarray) -> tuple[int, tuple[float, float], float]:
    """Best template by soft overlap, searched a few pixels around where its centre of mass falls."""
    masks, mass = _templates()
    weight = soft.sum()
    cx = float((soft * np.arange(SIZE)[None]).sum() / weight)
    cy = float((soft * np.arange(SIZE)[:, None]).sum() / weight)
    padded = np.pad(soft, 48)
    best = (-1, (cx, cy), -1.0)
    for shape, (template, (mx, my)) in enumerate(zip(masks, mass, strict=True)):
        x0, y0 = round(cx - mx), round(cy - my)
        for y in range(y0 - 2, y0 + 3):
            for x in range(x0 - 2, x0 + 3):
                window = padded[y + 16 : y + 80, x + 16 : x + 80]
                if window.shape != template.shape:
                    continue
                both = np.minimum(window, template).sum()
                iou = float(both / (weight + template.sum() - both))
                if iou > best[2]:
                    best = (shape, (float(x), float(y)), iou)
    return best
