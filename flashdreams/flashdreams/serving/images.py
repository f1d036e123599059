"""Images that clients sent, until they are used: a few, for a while, never in a file."""

from __future__ import annotations

import io
import secrets
import time
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from flashdreams.core.media import MediaError
from flashdreams.core.media.image import decode_image
from flashdreams.serving.config import ServeConfig
from flashdreams.serving.protocol import ProtocolError

KEPT_SECONDS = 600.0


@dataclass(frozen=True)
class Upload:
    """The file as it came, and the size that its header and its pixels agree on."""

    data: bytes
    height: int
    width: int
    added: float


class Images:
    """Uploads by name. The oldest make room for new ones."""

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        self._uploads: OrderedDict[str, Upload] = OrderedDict()

    def check(self, data: bytes) -> tuple[int, int, tuple[str, ...]]:
        """Height, width and notices of an image, which is decoded whole; blocks for as long as that takes.

        Raises:
            MediaError: it is none, or too large.
        """
        image = decode_image(io.BytesIO(data), "upload", max_pixels=self._config.max_image_pixels)
        return image.pixels.shape[0], image.pixels.shape[1], image.notices

    def add(self, data: bytes, height: int, width: int) -> str:
        """Keep a checked image; returns its name."""
        name = "image_" + secrets.token_urlsafe(12)
        now = time.monotonic()
        self._uploads[name] = Upload(data, height, width, now)
        while len(self._uploads) > self._config.images_kept or (
            now - next(iter(self._uploads.values())).added > KEPT_SECONDS
        ):
            self._uploads.popitem(last=False)
        return name

    def get(self, name: str) -> Upload:
        """An image that was kept; ProtocolError where there is none of this name (any more)."""
        if name not in self._uploads:
            raise ProtocolError("unknown_image", f"there is no image {name!r} (any more); send it again")
        return self._uploads[name]

    def pixels(self, upload: Upload, height: int | None, width: int | None) -> np.ndarray:
        """uint8 ``[H, W, 3]`` of this size (its own if ``None``); blocks while it decodes."""
        limit = self._config.max_image_pixels
        try:
            return decode_image(io.BytesIO(upload.data), "upload", height, width, limit).pixels
        except MediaError as error:
            raise ProtocolError("invalid", str(error)) from None
