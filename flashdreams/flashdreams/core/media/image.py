"""Images people give: whatever their mode, made 8-bit RGB of the size a model wants, or refused in a sentence."""

from __future__ import annotations

import os
import threading
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
from PIL import Image, ImageFile, ImageOps

from flashdreams.core.media import MediaError
from flashdreams.core.media.output import reason
from flashdreams.core.notices import say_once

MAX_PIXELS = 2**26
"""67 million: above any camera in common use, below what could exhaust a laptop's memory."""
BACKGROUND = (255, 255, 255)
"""White, as on a page: what shows through transparent pixels."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP", "PPM", "AVIF", "JPEG2000")
_ADVICE = "give it as an 8-bit RGB PNG or JPEG"
_decoding = threading.Lock()
_TIFF_BITS, _TIFF_PHOTOMETRIC, _WHITE_IS_ZERO = 258, 262, 0


@dataclass(frozen=True)
class ImageInput:
    """An image as a model takes it: ``pixels`` uint8 RGB ``[H, W, 3]``, and what was done to get there."""

    pixels: np.ndarray
    notices: tuple[str, ...] = ()


def read_image(
    path: str | os.PathLike[str], height: int | None = None, width: int | None = None, max_pixels: int = MAX_PIXELS
) -> ImageInput:
    """Read an image file; each notice is said once. Arguments and result as in :func:`decode_image`.

    Raises:
        MediaError: there is no such file, it cannot be read as an image, or it is too large.
    """
    path = Path(path)
    name = str(path)
    try:
        if not path.exists():
            raise MediaError(f"image {name!r} does not exist; check the path")
        if not path.is_file():
            raise MediaError(f"image {name!r} is not a file; give the path of an image file")
        if path.stat().st_size == 0:
            raise MediaError(f"image {name!r} is empty (0 bytes); copy or download it again")
        with path.open("rb") as stream:
            image = decode_image(stream, name, height, width, max_pixels)
    except OSError as error:
        raise MediaError(f"image {name!r} cannot be read: {reason(error)}") from None
    for notice in image.notices:
        say_once(notice)
    return image


def decode_image(
    stream: IO[bytes], name: str, height: int | None = None, width: int | None = None, max_pixels: int = MAX_PIXELS
) -> ImageInput:
    """Decode an image of any mode into 8-bit RGB, upright, of the size asked for.

    The content decides the format. The size is read from the header, before anything is unpacked. 16-bit and float
    images are scaled (not clipped) to 8 bits, transparent pixels composited over ``BACKGROUND``; of an animation the
    first frame is used. With ``height`` and ``width`` (both or neither) the image is scaled, its shape kept, until it
    covers that size, and what protrudes is cropped on both sides alike.

    Args:
        stream: seekable, at its start.
        name: of the image, for messages.

    Raises:
        MediaError: not an image that can be read, or more than ``max_pixels`` pixels.
    """
    if (height is None) != (width is None):
        raise ValueError(f"height is {height} and width is {width}; give both or neither")
    notices: list[str] = []
    # What the library would warn of is either an error here or harmless. The filter is the whole process's, hence the
    # lock: two threads that restore it in the wrong order would lose it for good.
    with _decoding, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        image = _open(stream, name, max_pixels)
        try:
            if getattr(image, "is_animated", False):
                notices.append(f"image {name!r} holds several frames; the first one is used")
            image.load()
            _turn_upright(image)
            rgb, composited = _to_rgb(image, name)
        except MediaError:
            raise
        except Exception as error:  # decoders raise nearly anything on damaged data
            raise MediaError(
                f"image {name!r} is damaged or of an unsupported kind ({image.format}, mode {image.mode}: "
                f"{reason(error)}); {_ADVICE}"
            ) from error
    if composited:
        notices.append(f"image {name!r} has transparent pixels; they are shown over white")
    if height is not None and width is not None:
        if rgb.width * height != rgb.height * width:
            cover = max(width / rgb.width, height / rgb.height)
            cropped = 1 - (width / cover) * (height / cover) / (rgb.width * rgb.height)
            notices.append(
                f"image {name!r} is {rgb.height}x{rgb.width} (height x width); to fill {height}x{width} without "
                f"distortion, {cropped:.1%} of it is cropped, on both sides alike"
            )
        rgb = ImageOps.fit(rgb, (width, height), method=Image.Resampling.LANCZOS)
    return ImageInput(np.array(rgb), tuple(notices))


def _open(stream: IO[bytes], name: str, max_pixels: int) -> ImageFile.ImageFile:
    """Read the header, like ``PIL.Image.open``, whose size check has a global limit and its own way of failing."""
    prefix = stream.read(16)
    Image.init()
    for kind in FORMATS:
        factory, accepts = Image.OPEN.get(kind, (None, None))
        verdict = accepts is not None and accepts(prefix)
        if factory is None or not verdict or isinstance(verdict, str):  # a string: this build cannot read the format
            continue
        stream.seek(0)
        try:
            image = factory(stream, name)
        except Image.DecompressionBombError:
            raise MediaError(
                f"image {name!r} has more pixels than the limit of {max_pixels:,}; scale it down"
            ) from None
        except Exception as error:
            raise MediaError(f"image {name!r} is a damaged {kind} file ({reason(error)}); copy it again") from error
        if image.width * image.height > max_pixels:
            raise MediaError(
                f"image {name!r} is {image.height}x{image.width} (height x width), {image.width * image.height:,} "
                f"pixels; the limit is {max_pixels:,}: scale it down"
            )
        return image
    raise MediaError(f"image {name!r} is not an image that can be read ({', '.join(FORMATS)}); {_ADVICE}")


def _turn_upright(image: ImageFile.ImageFile) -> None:
    """Turn the image as its EXIF orientation says; an unreadable EXIF block says nothing."""
    with suppress(Exception):
        ImageOps.exif_transpose(image, in_place=True)


def _to_rgb(image: ImageFile.ImageFile, name: str) -> tuple[Image.Image, bool]:
    """The image in mode RGB, and whether transparent pixels were composited."""
    deep = image.mode.startswith("I") or image.mode == "F"
    shallow = _to_8_bit(image, name) if deep else image
    if not shallow.has_transparency_data:
        return shallow.convert("RGB"), False
    rgba = shallow.convert("RGBA")
    alpha = rgba.getchannel("A")
    if alpha.getextrema() == (255, 255):
        return rgba.convert("RGB"), False
    canvas = Image.new("RGB", rgba.size, BACKGROUND)
    canvas.paste(rgba, mask=alpha)
    return canvas, True


def _to_8_bit(image: ImageFile.ImageFile, name: str) -> Image.Image:
    """A grey image of 16-bit, 32-bit or float values, scaled to mode L (LA where one value means transparent).

    The library's own conversion clips instead: 16-bit grey turns white, float grey black.
    """
    values = np.asarray(image)
    tags = getattr(image, "tag_v2", {})
    if image.mode == "F":
        low, high = float(values.min()), float(values.max())
        if not 0 <= low <= high <= 1:  # also false for NaN
            raise MediaError(f"image {name!r} has float values from {low:g} to {high:g}; expected 0 to 1: {_ADVICE}")
        peak = 1.0
    elif image.mode == "I" and image.format != "PPM":
        raise MediaError(f"image {name!r} has 32-bit or signed values, whose range is not defined; {_ADVICE}")
    else:
        peak = 2.0 ** tags.get(_TIFF_BITS, (16,))[0] - 1
    levels = np.rint(values * np.float32(255 / peak)).astype(np.uint8)
    if tags.get(_TIFF_PHOTOMETRIC) == _WHITE_IS_ZERO:
        levels = 255 - levels
    grey = Image.fromarray(levels)
    if "transparency" in image.info:
        opaque = np.where(values == image.info["transparency"], 0, 255).astype(np.uint8)
        return Image.merge("LA", (grey, Image.fromarray(opaque)))
    return grey
