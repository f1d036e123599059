"""PNG pictures of a video: one frame, or a sheet of many."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from PIL import Image

from flashdreams.core.media import MediaError
from flashdreams.core.media.output import check_output, reason

_GAP = 2
_GAP_LEVEL = 32
_MAX_SIDE = 256


def pick_frames(num_frames: int, max_frames: int = 24) -> list[int]:
    """Indices of at most ``max_frames`` frames, evenly spaced, the first and the last among them."""
    count = min(num_frames, max_frames)
    if count < 2:
        return [0] * count
    return [round(i * (num_frames - 1) / (count - 1)) for i in range(count)]


def contact_sheet(frames: np.ndarray, path: str | os.PathLike[str], columns: int = 8, max_frames: int = 24) -> None:
    """Write evenly spaced ``frames`` (uint8 ``[T, H, W, 3]``), row by row, as one PNG.

    Frames whose longer side exceeds 256 pixels are scaled down to that.

    Raises:
        MediaError: the file cannot be written.
    """
    frames = np.asarray(frames)
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[-1] != 3 or len(frames) == 0:
        raise ValueError(f"frames are {frames.dtype} {list(frames.shape)}; expected uint8 [T, H, W, 3] with T >= 1")
    if columns < 1 or max_frames < 1:
        raise ValueError(f"columns is {columns} and max_frames is {max_frames}; expected 1 or more of both")
    tiles = [_tile(frames[index]) for index in pick_frames(len(frames), max_frames)]
    height, width = tiles[0].shape[:2]
    columns = min(columns, len(tiles))
    rows = -(-len(tiles) // columns)
    shape = (rows * (height + _GAP) + _GAP, columns * (width + _GAP) + _GAP, 3)
    sheet = np.full(shape, _GAP_LEVEL, dtype=np.uint8)
    for index, tile in enumerate(tiles):
        top = _GAP + index // columns * (height + _GAP)
        left = _GAP + index % columns * (width + _GAP)
        sheet[top : top + height, left : left + width] = tile
    write_png(sheet, path)


def write_png(frame: np.ndarray, path: str | os.PathLike[str]) -> None:
    """Write one frame, uint8 ``[H, W, 3]``, as a PNG; its folder is made.

    Raises:
        MediaError: the file cannot be written.
    """
    frame = np.asarray(frame)
    if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[-1] != 3:
        raise ValueError(f"frame is {frame.dtype} {list(frame.shape)}; expected uint8 [H, W, 3]")
    path = Path(path)
    check_output(path, ".png")
    try:
        Image.fromarray(frame).save(path, format="PNG")
    except OSError as error:
        raise MediaError(f"image {str(path)!r} cannot be written: {reason(error)}") from error


def _tile(frame: np.ndarray) -> np.ndarray:
    height, width = frame.shape[:2]
    scale = _MAX_SIDE / max(height, width)
    if scale >= 1:
        return frame
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    return np.asarray(Image.fromarray(frame).resize(size, Image.Resampling.LANCZOS))
