"""Frames as a client takes them."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from flashdreams.serving.wire import FrameHeader

_OPTIONS = {"jpeg": {"subsampling": 0}, "webp": {"method": 0}, "png": {"compress_level": 1}}


def encode(frame: np.ndarray, encoding: str, quality: int) -> bytes:
    """uint8 RGB ``[H, W, 3]`` as bytes; ``quality`` (1 to 100) is that of JPEG and WebP."""
    if encoding == "raw":
        return frame.tobytes()
    stream = io.BytesIO()
    options = _OPTIONS[encoding] if encoding == "png" else {**_OPTIONS[encoding], "quality": quality}
    Image.fromarray(frame).save(stream, encoding, **options)
    return stream.getvalue()


def decode(header: FrameHeader, body: bytes | memoryview) -> np.ndarray:
    """The pixels of a binary message, uint8 ``[H, W, 3]``."""
    if header.encoding == "raw":
        return np.frombuffer(body, np.uint8).reshape(header.height, header.width, 3)
    with Image.open(io.BytesIO(body), formats=[header.encoding]) as image:
        if image.size != (header.width, header.height):
            raise ValueError(f"a picture of {image.size} came with a header of {(header.width, header.height)}")
        return np.asarray(image.convert("RGB"))
