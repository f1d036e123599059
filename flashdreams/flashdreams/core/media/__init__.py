"""Reading and writing of images and video. Importing this package alone loads no media library."""

from __future__ import annotations


class MediaError(ValueError):
    """A file or value of the person cannot be used. The message names it, what was expected, and what to do."""
