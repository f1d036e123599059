"""Frame rates: exact fractions, from the text a person writes to the time base of the file."""

from __future__ import annotations

import re
from fractions import Fraction

from flashdreams.core.media import MediaError
from flashdreams.core.notices import say_once

MIN_FPS = Fraction(1, 10)
MAX_FPS = Fraction(1000)
MAX_DENOMINATOR = 10**6
"""Keeps rate and time scale within the 32 bits that an mp4 has for them."""

_NUMBER = r"[0-9]{1,18}(?:\.[0-9]{0,18})?"
_RATE = re.compile(rf"\s*({_NUMBER})\s*(?:/\s*({_NUMBER}))?\s*")


def parse_fps(value: str | float | Fraction) -> Fraction:
    """The exact frame rate of a text such as ``24``, ``23.976`` or ``30000/1001``, from 0.1 to 1000.

    A decimal is taken at its word: 23.976 is 2997/125, not 24000/1001. With more than six decimals, the nearest
    fraction with a denominator of at most a million is used (29.97002997002997 is 30000/1001), and this is said once.

    Raises:
        MediaError: not a frame rate, or out of range.
    """
    match = _RATE.fullmatch(str(value))
    numerator, denominator = (Fraction(part or 1) for part in match.groups()) if match else (Fraction(0), Fraction(1))
    exact = numerator / denominator if denominator else Fraction(0)
    if not MIN_FPS <= exact <= MAX_FPS:
        raise MediaError(
            f"fps is {str(value)!r}; expected a number from {float(MIN_FPS):g} to {float(MAX_FPS):g}, "
            "such as 24, 23.976 or 30000/1001"
        )
    rate = exact.limit_denominator(MAX_DENOMINATOR)
    if rate != exact:
        say_once(f"fps {value} has more digits than a video file can hold; using {rate}")
    return rate
