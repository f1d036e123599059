"""A file of controls: what a rollout consumed, frame by frame, so that it can be made again.

JSON, one object a line. The first line says what this is::

    {"format": "flashdreams-controls-1", "fps": 16.0, "model": "some-model", "takes": {"keys": {"w": "up", ...}}}

and each further line is one frame, in order, with what was said about it::

    {"frame": 0}
    {"frame": 1, "keys": ["d"], "mouse": {"dx": 0.25, "dy": 0.0, "buttons": []}}
    {"frame": 2, "pose": {"matrix": [[1.0, ...], ...], "intrinsics": {"fx": 500.0, ...}}, "word": "right"}

A file may begin at a later frame (of a rollout that was resumed). Its last line may be cut short, as a killed process
leaves it; anything else out of order is an error with its line number. Pixels (``picture``, ``frame``) are not held:
keep the video file itself, which is what such a model is controlled by.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from flashdreams.core.controls.messages import as_object, control_from_json, control_to_json
from flashdreams.core.controls.spec import ControlSpec
from flashdreams.core.controls.types import Control, ControlError
from flashdreams.core.notices import say_once

FORMAT = "flashdreams-controls-1"
SUFFIX = ".jsonl"
MAX_LINE = 100_000
"""Bytes; a frame with a pose has less than 1,000."""
MAX_FRAMES = 10_000_000
"""A week at 16 frames a second."""


@dataclass(frozen=True)
class Recording:
    """A recording: one control per frame from frame 0, and how it was made."""

    controls: list[Control | None]
    fps: float
    model: str
    takes: dict[str, Any] = field(default_factory=dict)
    """What the model took, as :meth:`ControlSpec.to_dict` gives it; for people."""


class ControlWriter:
    """Writes a recording as it grows. What is written stays readable, whenever the process ends.

    Raises:
        ControlError: the file cannot be written, or the model is controlled by pixels.
    """

    def __init__(self, path: str | os.PathLike[str], *, fps: float, model: str, takes: ControlSpec) -> None:
        self.path = Path(path)
        if takes.pixels:
            raise ControlError(
                f"controls of {model} are pixels, which {self.path} would not hold; keep the video file itself"
            )
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[bytes] = self.path.open("wb", buffering=0)
        except OSError as error:
            raise self._unwritable(error) from None
        self._lines([{"format": FORMAT, "fps": float(fps), "model": model, "takes": takes.to_dict()}])

    def write(self, start: int, controls: Iterable[Control | None]) -> None:
        """Add the controls of the frames from ``start`` on."""
        self._lines([{"frame": frame} | control_to_json(control) for frame, control in enumerate(controls, start)])

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> ControlWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _lines(self, values: Iterable[dict[str, Any]]) -> None:
        data = "".join(json.dumps(value, allow_nan=False) + "\n" for value in values).encode("ascii")
        try:
            while data:  # an unbuffered write may take a part only
                data = data[self._file.write(data) :]
        except OSError as error:
            self._file.close()
            raise self._unwritable(error) from None

    def _unwritable(self, error: OSError) -> ControlError:
        return ControlError(f"controls cannot be written to {self.path}: {error.strerror or error}")


def save_controls(
    path: str | os.PathLike[str],
    controls: Iterable[Any],
    *,
    fps: float,
    model: str = "",
    takes: ControlSpec,
) -> None:
    """Write a recording of ``controls``, one per frame, such as a script or a trajectory made elsewhere."""
    checked = [takes.validate(control) for control in controls]
    with ControlWriter(path, fps=fps, model=model, takes=takes) as writer:
        writer.write(0, checked)


def load_controls(path: str | os.PathLike[str]) -> Recording:
    """Read a recording.

    Raises:
        ControlError: not a recording, or damaged; with the number of the line.
    """
    try:
        with Path(path).open("rb") as file:
            return _read(_lines(file, str(path)), str(path))
    except OSError as error:
        raise ControlError(f"control file {path} cannot be read: {error.strerror or error}") from None


def _lines(file: IO[bytes], name: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each line's number and object. A last line without its end that is not whole is left out, which is said."""
    number = 0
    while line := file.readline(MAX_LINE + 1):
        number += 1
        where = f"{name}, line {number}"
        if len(line) > MAX_LINE:
            raise ControlError(f"{where} is longer than {MAX_LINE} bytes; this is no control file")
        try:
            value = json.loads(line.decode(), parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:  # not UTF-8, or not JSON
            if not line.endswith(b"\n") and number > 1:
                say_once(f"{where} is cut short, as if the recording was ended by force; it is left out")
                return
            raise ControlError(f"{where} is not valid JSON: {error}") from None
        try:
            yield number, as_object(value, "line")
        except ControlError as error:
            raise ControlError(f"{where}: {error}") from None


def _read(lines: Iterator[tuple[int, dict[str, Any]]], name: str) -> Recording:
    number, header = next(lines, (1, {}))
    if header.get("format") != FORMAT:
        raise ControlError(
            f"{name}, line {number}: format is {header.get('format')!r:.40}; expected {FORMAT!r}, as --save-control "
            "and save_controls write it"
        )
    fps, model, takes = header.get("fps"), header.get("model"), header.get("takes")
    if isinstance(fps, bool) or not isinstance(fps, (int, float)) or not (0 < fps < 1e6):
        raise ControlError(f"{name}, line {number}: fps is {fps!r:.40}; expected a number above 0")
    if not isinstance(model, str) or not isinstance(takes, dict):
        raise ControlError(f"{name}, line {number}: expected the model's name and what it takes (model, takes)")
    controls: list[Control | None] = []
    for number, line in lines:
        try:
            frame = line.pop("frame", None)
            if not controls and isinstance(frame, int) and 0 < frame <= MAX_FRAMES:
                controls = [None] * frame  # of a rollout that was resumed
            if isinstance(frame, bool) or frame != len(controls) or not isinstance(frame, int):
                raise ControlError(f"frame is {frame!r:.40}; expected {len(controls)}, as no frame may be left out")
            controls.append(control_from_json(line))
        except ControlError as error:
            raise ControlError(f"{name}, line {number}: {error}") from None
    return Recording(controls, float(fps), model, takes)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no finite number")
