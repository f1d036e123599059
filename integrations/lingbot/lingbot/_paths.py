"""Files of camera poses, fitted to the frames of a run.

A folder as the original reads it, ``poses.npy`` ``[N, 4, 4]`` (camera-to-world, OpenCV axes) and ``intrinsics.npy``
``[M, 4]`` (fx, fy, cx, cy in pixels of a 480x832 picture, of which the first row counts), perhaps with ``action.npy``
``[N, 4]`` (whether W, A, S, D are held); or an ``.npz`` or a JSON object with the same names.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flashdreams.core.controls import Control, ControlError, Intrinsics, Keys, Pose
from flashdreams.core.notices import say_once
from lingbot._camera import PICTURE, longest_step, resample
from lingbot._keys import MOVES

NAMES = "poses", "intrinsics", "action"
MAX_BYTES = 100_000_000


@dataclass(frozen=True)
class CameraPath:
    """Poses float64 ``[N, 4, 4]``, one per pixel frame; what the camera sees, and the keys of each frame, if said."""

    poses: Tensor
    intrinsics: Intrinsics | None = None
    keys: tuple[Keys, ...] | None = None


def is_path(source: str) -> bool:
    """Whether ``source`` names a file of poses, by its form alone, or is a folder or looks like one."""
    if not source or "\n" in source:
        return False
    suffix = Path(source).suffix
    return suffix in (".npz", ".json", ".npy") or os.path.isdir(source) or ("/" in source and not suffix)


def read_path(source: str | Path) -> CameraPath:
    """Read and check a file or folder of poses.

    Raises:
        ControlError: it cannot be read, or holds something else; with the file, the frame, and what was expected.
    """
    source = Path(source)
    arrays = _arrays(source.parent if source.name == "poses.npy" else source)
    if "poses" not in arrays:
        raise ControlError(f"{source} has no poses; expected poses.npy (or a key 'poses'), [N, 4, 4] camera-to-world")
    poses = _numbers(arrays["poses"], f"poses of {source}")
    if poses.ndim != 3 or poses.shape[1:] != (4, 4) or not len(poses):
        raise ControlError(f"poses of {source} have shape {list(poses.shape)}; expected [N, 4, 4], camera-to-world")
    for frame, matrix in enumerate(poses):
        try:
            Pose(matrix)
        except ControlError as error:
            raise ControlError(f"frame {frame} of {source}: {error}") from None
    return CameraPath(torch.from_numpy(poses), _intrinsics(arrays, source), _keys(arrays, len(poses), source))


def controls_of(path: CameraPath, frames: int, chunk_frames: int, step: float = 1.0) -> list[Control]:
    """A control for each of ``frames`` pixel frames, of which there are one and a multiple of four.

    The path is cut to one and a multiple of four poses. Where it then differs from the run by less than a chunk, it is
    spread over the run: rounding to whole chunks is no reason to lose its end. A longer one is followed as far as the
    run goes, and at the end of a shorter one the camera stops. Then it is scaled, so that the longest step from one
    latent frame to the next has the length ``step``.

    Args:
        chunk_frames: pixel frames of a chunk.
    """
    count = 4 * ((len(path.poses) - 1) // 4) + 1
    last = count - 1 if abs(count - frames) < chunk_frames else frames - 1
    if last >= count:
        say_once(f"the camera's path has {count} of {frames} frames; at its end the camera stops")
    points = torch.linspace(0, last, frames, dtype=torch.float64).clamp(max=count - 1)
    poses = resample(path.poses[:count], points)
    poses[:, :3, 3] *= step / (longest_step(poses[::4]) or 1.0)
    nearest = points.round().long().tolist()
    keys = [None] * frames if path.keys is None else [path.keys[i] for i in nearest]
    return [
        Control(pose=Pose(pose, path.intrinsics), keys=held) for pose, held in zip(poses.tolist(), keys, strict=True)
    ]


def _arrays(source: Path) -> Mapping[str, Any]:
    """What is stored under each of the names."""
    try:
        if source.is_dir():
            return {name: _load(source / f"{name}.npy") for name in NAMES if (source / f"{name}.npy").exists()}
        if source.stat().st_size > MAX_BYTES:
            raise ControlError(f"{source} has {source.stat().st_size} bytes; at most {MAX_BYTES} are read")
        if source.suffix == ".json":
            found = json.loads(source.read_text(encoding="utf-8"))
            if not isinstance(found, dict):
                raise ControlError(f"{source} holds {type(found).__name__}; expected an object with a key 'poses'")
            return found
        if source.suffix == ".npz":
            with np.load(source, allow_pickle=False) as stored:
                return {name: stored[name] for name in NAMES if name in stored.files}
    except (OSError, UnicodeDecodeError, ValueError, EOFError, zipfile.BadZipFile) as error:
        if isinstance(error, ControlError):
            raise
        raise ControlError(f"{source} cannot be read as a camera's path: {error}") from None
    raise ControlError(f"{source} is no camera's path; expected a folder with poses.npy, an .npz or a .json")


def _load(file: Path) -> np.ndarray:
    if file.stat().st_size > MAX_BYTES:
        raise ControlError(f"{file} has {file.stat().st_size} bytes; at most {MAX_BYTES} are read")
    return np.load(file, allow_pickle=False)


def _numbers(value: Any, what: str) -> np.ndarray:
    try:
        array = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        raise ControlError(f"{what} are not rows of equal length of numbers") from None
    if not np.isfinite(array).all():
        raise ControlError(
            f"{what} hold a number that is not finite, first in row {np.argwhere(~np.isfinite(array))[0][0]}"
        )
    return array


def _intrinsics(arrays: Mapping[str, Any], source: Path) -> Intrinsics | None:
    if "intrinsics" not in arrays:
        return None
    rows = _numbers(arrays["intrinsics"], f"intrinsics of {source}")
    if rows.shape[-1:] != (4,) or rows.ndim > 2 or not rows.size:
        raise ControlError(f"intrinsics of {source} have shape {list(rows.shape)}; expected rows of fx, fy, cx, cy")
    height, width = PICTURE
    return Intrinsics(*rows.reshape(-1, 4)[0], width=width, height=height)


def _keys(arrays: Mapping[str, Any], count: int, source: Path) -> tuple[Keys, ...] | None:
    if "action" not in arrays:
        return None
    rows = _numbers(arrays["action"], f"action of {source}")
    if rows.shape != (count, len(MOVES)) or not np.isin(rows, (0, 1)).all():
        raise ControlError(
            f"action of {source} has shape {list(rows.shape)}; expected {[count, len(MOVES)]} of 0 and 1, whether "
            f"{', '.join(MOVES)} are held at each pose"
        )
    return tuple(Keys(*(key for key, down in zip(MOVES, row, strict=True) if down)) for row in rows.tolist())
