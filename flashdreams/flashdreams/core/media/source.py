"""Videos people give to be worked on: every frame, in order, in constant memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from av.video.reformatter import ColorRange, Interpolation, VideoReformatter

from flashdreams.core.media import MediaError
from flashdreams.core.media.fps import MAX_DENOMINATOR, MAX_FPS, MIN_FPS
from flashdreams.core.media.output import reason
from flashdreams.core.notices import say_once

_ACCURATE = (
    Interpolation.BILINEAR | Interpolation.ACCURATE_RND | Interpolation.FULL_CHR_H_INT | Interpolation.FULL_CHR_H_INP
)


@dataclass(frozen=True)
class VideoSource:
    """A video file that was decoded once from end to end, so that all of this is known and not guessed."""

    path: Path
    height: int
    width: int
    frames: int
    fps: Fraction
    """Evenly spaced frames at this rate last as long as the video does."""
    start: Fraction
    """Seconds at which the first frame stands in the file."""

    def read(self, most: int) -> Iterator[np.ndarray]:
        """Every frame, upright: uint8 RGB ``[T, height, width, 3]``, ``T`` from 1 to ``most``.

        Raises:
            MediaError: the file is not the one that was looked at.
        """
        reformatter, batch, count = VideoReformatter(), [], 0
        for _, frame in _decoded(self.path):
            picture = reformatter.reformat(
                frame, format="rgb24", dst_color_range=ColorRange.JPEG, interpolation=_ACCURATE, threads=1
            )
            batch.append(np.rot90(picture.to_ndarray(), _quarter_turns(frame)))
            count += 1
            if len(batch) == most:
                yield np.stack(batch)
                batch = []
        if batch:
            yield np.stack(batch)
        if count != self.frames:
            raise MediaError(f"video {str(self.path)!r} had {self.frames} frames and now has {count}: it was changed")


def open_video(path: str | os.PathLike[str]) -> VideoSource:
    """Decode a video once, for the number, the size and the times of its frames.

    A variable frame rate becomes an even one of the same duration, which is said once.

    Raises:
        MediaError: there is no such file, or it is no video that can be decoded to its end.
    """
    path = Path(path)
    if not path.is_file():
        raise MediaError(f"video {str(path)!r} does not exist or is not a file; check the path")
    times = _Times()
    size: tuple[int, int] | None = None
    for stream, frame in _decoded(path):
        upright = (frame.height, frame.width) if _quarter_turns(frame) % 2 == 0 else (frame.width, frame.height)
        size = size or upright
        if size != upright:
            raise MediaError(
                f"video {str(path)!r} changes from {size[0]}x{size[1]} to {upright[0]}x{upright[1]} (height x width) "
                f"at frame {times.count}; convert it to one size first"
            )
        times.add(frame, stream.average_rate)
    if size is None:
        raise MediaError(f"video {str(path)!r} holds no frames; copy or download it again")
    fps = times.rate()
    if not MIN_FPS <= fps <= MAX_FPS:
        raise MediaError(
            f"video {str(path)!r} has {float(fps):g} frames a second; expected {float(MIN_FPS):g} to {float(MAX_FPS):g}"
        )
    if not times.even:
        say_once(
            f"video {str(path)!r} has a variable frame rate (steps of {1000 * float(times.shortest):.0f} to "
            f"{1000 * float(times.longest):.0f} ms); its {times.count} frames are spaced evenly, at {float(fps):.6g} "
            f"fps, so that it lasts {float(times.count / fps):.6g} s as before"
        )
    return VideoSource(path, *size, times.count, fps, times.first)


class _Times:
    """When the frames stand, gathered as they are decoded, in constant memory."""

    def __init__(self) -> None:
        self.count = 0
        self.first = self.last = Fraction(0)
        self.shortest, self.longest = Fraction(MAX_DENOMINATOR), Fraction(0)
        self.tick = Fraction(0)
        """What times in the file are multiples of."""
        self.stated: Fraction | None = None
        """The rate that the file says it has."""
        self._last_duration = Fraction(0)

    def add(self, frame: Any, stated: Fraction | None) -> None:
        self.stated = stated or self.stated
        time = self.last
        if frame.pts is not None and frame.time_base is not None:
            self.tick = Fraction(frame.time_base)
            time = frame.pts * self.tick
        if self.count:
            self.shortest, self.longest = min(self.shortest, time - self.last), max(self.longest, time - self.last)
        else:
            self.first = time
        self.last = time
        self._last_duration = (frame.duration or 0) * self.tick
        self.count += 1

    @property
    def even(self) -> bool:
        """Whether all steps are equal, up to the rounding of times to a tick that is small beside them."""
        spread = self.longest - self.shortest
        return self.count < 3 or spread == 0 or (spread <= 2 * self.tick and 4 * spread <= self.longest)

    def rate(self) -> Fraction:
        """Frames by duration, that of the last frame included: of even steps, the simplest rate that the times allow.
        The stated rate where no times are."""
        step = (self.last - self.first) / max(1, self.count - 1)
        last = step if self.even and step else self._last_duration or step
        duration = self.last - self.first + last
        if duration <= 0:
            return self.stated or Fraction(0)
        rate = self.count / duration
        for simple in (self.stated, rate.limit_denominator(1), rate.limit_denominator(1001)) if self.even else ():
            if simple and abs(self.count / simple - duration) <= 2 * self.tick:
                return simple
        return rate.limit_denominator(MAX_DENOMINATOR)


def _decoded(path: Path) -> Iterator[tuple[Any, Any]]:
    """The video stream of a file with each of its frames."""
    try:
        with av.open(os.path.realpath(path)) as container:
            stream: Any = container.streams.best("video")
            if stream is None:
                raise MediaError(f"video {str(path)!r} has no picture in it; give a video file")
            stream.thread_type = "AUTO"
            for frame in container.decode(stream):
                yield stream, frame
    except (av.FFmpegError, OSError) as error:
        raise MediaError(f"video {str(path)!r} cannot be read: {reason(error)}; give an mp4, mov or webm") from None


def _quarter_turns(frame: Any) -> int:
    """How often a frame is to be turned by 90 degrees against the clock, as a phone that was held upright says."""
    return round(frame.rotation / 90) % 4
