"""Frame sizes a model can make: multiples of its VAE stride times its patch size."""

from __future__ import annotations

import math

from flashdreams.core.notices import say_once


def snap_size(height: int, width: int, multiple: int, strict: bool = False) -> tuple[int, int]:
    """The size nearest to ``(height, width)`` whose sides are positive multiples of ``multiple``; a tie goes down.

    A size that had to change is said once, with both values.

    Args:
        multiple: pixels; the spatial compression of the VAE times the patch size of the network.
        strict: raise instead of changing the size.

    Raises:
        ValueError: a side is zero or negative, or ``strict`` and the size is no multiple.
    """
    if multiple < 1:
        raise ValueError(f"size multiple is {multiple}; expected 1 or more")
    for name, side in (("height", height), ("width", width)):
        if side < 1:
            raise ValueError(f"{name} is {side}; expected a positive number of pixels, such as {8 * multiple}")
    snapped = _nearest(height, multiple), _nearest(width, multiple)
    if snapped == (height, width):
        return snapped
    problem = f"size {height}x{width} (height x width) does not fit this model, whose sides are multiples of {multiple}"
    if strict:
        raise ValueError(
            f"{problem}; the nearest valid heights are {_neighbours(height, multiple)}, "
            f"the nearest valid widths {_neighbours(width, multiple)}"
        )
    say_once(f"{problem}; using {snapped[0]}x{snapped[1]}")
    return snapped


def _nearest(side: int, multiple: int) -> int:
    # Ceiling of (side / multiple - 1/2) in whole numbers: a tie takes the smaller side, which costs less memory.
    return max(1, -((multiple - 2 * side) // (2 * multiple))) * multiple


def _neighbours(side: int, multiple: int) -> str:
    below = side // multiple * multiple
    valid = [below] if below == side else [below, below + multiple]
    return " and ".join(str(value) for value in valid if value > 0)


def area_size(image: tuple[int, int], area: int, multiple: int) -> tuple[int, int]:
    """Height and width of an image's shape with about ``area`` pixels: both cut off to a multiple.

    Of Wan2.1 and Wan2.2 image-to-video (``wan/image2video.py``). A side is at least ``multiple``.

    Args:
        image: its height and width.
    """
    ratio = image[0] / image[1]
    height, width = math.sqrt(area * ratio), math.sqrt(area / ratio)
    return max(1, int(height // multiple)) * multiple, max(1, int(width // multiple)) * multiple


def cells_size(image: tuple[int, int], area: int, cell: int) -> tuple[int, int]:
    """Height and width with at most about ``area`` pixels, in whole cells, that distort an image's shape least.

    Of Wan2.2 TI2V (``wan/utils/utils.py``): one side is cut off to whole cells and the other made to fit the area;
    of the two ways to do so the one nearer to the image's shape is taken, and the second at a tie.
    """
    ratio = image[1] / image[0]
    by_width = max(1, int(math.sqrt(area * ratio) // cell)) * cell
    first = max(1, int(area / by_width // cell)) * cell, by_width
    by_height = max(1, int(area / math.sqrt(area * ratio) // cell)) * cell
    second = by_height, max(1, int(area / by_height // cell)) * cell

    def distortion(size: tuple[int, int]) -> float:
        other = size[1] / size[0]
        return max(ratio / other, other / ratio)

    return first if distortion(first) < distortion(second) else second
