"""Clips people give to go on from."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path

import av
import numpy as np
from PIL import Image, ImageOps

from flashdreams.core.media import MediaError
from flashdreams.core.media.output import reason
from flashdreams.core.notices import say_once


def read_clip(path: str | os.PathLike[str], height: int, width: int, most: int, step: int) -> np.ndarray:
    """The end of a video file, uint8 RGB ``[F, height, width, 3]``: its last ``1 + step * n`` frames, at most ``most``.

    Each frame is scaled, its shape kept, until it covers the size, and what protrudes is cropped on both sides alike.
    Only the frames that are returned are held in memory.

    Raises:
        MediaError: there is no such file, it cannot be read as a video, or it has no frames.
    """
    path = Path(path)
    if not path.is_file():
        raise MediaError(f"video {str(path)!r} does not exist or is not a file; check the path")
    kept: deque[np.ndarray] = deque(maxlen=most)
    count, shape = 0, (height, width)
    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise MediaError(f"video {str(path)!r} has no picture in it; give a video file")
            for frame in container.decode(container.streams.video[0]):
                shape = frame.height, frame.width
                image = ImageOps.fit(frame.to_image(), (width, height), method=Image.Resampling.LANCZOS)
                kept.append(np.asarray(image.convert("RGB")))
                count += 1
    except (av.FFmpegError, OSError) as error:
        raise MediaError(f"video {str(path)!r} cannot be read: {reason(error)}; give an mp4, mov or webm") from None
    if not count:
        raise MediaError(f"video {str(path)!r} holds no frames; copy or download it again")
    usable = 1 + (len(kept) - 1) // step * step
    if usable < count:
        say_once(f"video {str(path)!r} has {count} frames; the last {usable} of them are what the model goes on from")
    if shape[0] * width != shape[1] * height:
        say_once(f"video {str(path)!r} is {shape[0]}x{shape[1]} (height x width); it is cropped to {height}x{width}")
    return np.stack(list(kept)[-usable:])
