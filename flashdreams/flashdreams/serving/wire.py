"""Binary messages: one picture each, behind a header of 32 bytes. Standard library only; a page reads it likewise.

| bytes | type (little-endian) | |
|---|---|---|
| 0-1 | 2 letters | ``FD`` |
| 2 | uint8 | version, 1 |
| 3 | uint8 | encoding: 0 raw RGB, 1 JPEG, 2 WebP, 3 PNG |
| 4-7 | uint32 | number of the session |
| 8-11 | uint32 | generation: counts resets; pictures of an older one are not to be shown |
| 12-15 | uint32 | chunk |
| 16-19 | uint32 | frame, counted from the start of the generation |
| 20-27 | float64 | moment of the frame in the video, in seconds |
| 28-29, 30-31 | uint16 | height and width in pixels |
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

VERSION = 1
MAGIC = b"FD"
ENCODINGS = ("raw", "jpeg", "webp", "png")
_HEADER = struct.Struct("<2sBBIIIIdHH")
HEADER_BYTES = _HEADER.size


class WireError(ValueError):
    """Bytes that are no message of this protocol."""


@dataclass(frozen=True)
class FrameHeader:
    """What is said about one picture."""

    encoding: str
    session: int
    generation: int
    chunk: int
    frame: int
    pts: float
    height: int
    width: int

    def pack(self) -> bytes:
        code = ENCODINGS.index(self.encoding)
        numbers = self.session, self.generation, self.chunk, self.frame, self.pts, self.height, self.width
        return _HEADER.pack(MAGIC, VERSION, code, *numbers)


def unpack(message: bytes | bytearray | memoryview) -> tuple[FrameHeader, memoryview]:
    """Header and picture of a binary message.

    Raises:
        WireError: not such a message, of another version, or of another length than its size says.
    """
    view = memoryview(message)
    if len(view) < HEADER_BYTES:
        raise WireError(f"a message of {len(view)} bytes is no frame; its header alone has {HEADER_BYTES}")
    magic, version, code, *numbers = _HEADER.unpack_from(view)
    if magic != MAGIC or version != VERSION:
        raise WireError(f"a message begins with {magic!r} version {version}; expected {MAGIC!r} version {VERSION}")
    if code >= len(ENCODINGS):
        raise WireError(f"encoding {code} is unknown; there are {len(ENCODINGS)}: {', '.join(ENCODINGS)}")
    header = FrameHeader(ENCODINGS[code], *numbers)
    body = view[HEADER_BYTES:]
    if header.encoding == "raw" and len(body) != header.height * header.width * 3:
        raise WireError(f"a raw frame of {header.height}x{header.width} has {len(body)} bytes; expected 3 per pixel")
    return header, body
