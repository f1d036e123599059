"""Shared by the media tests: fresh notices, the case files, and a smooth moving picture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from flashdreams.core import notices


@pytest.fixture(autouse=True)
def fresh_notices() -> Iterator[None]:
    notices.reset()
    yield
    notices.reset()


@pytest.fixture
def cases() -> Path:
    """Small inputs made from public bug reports."""
    return Path(__file__).resolve().parents[1] / "cases"


@pytest.fixture
def moving_picture() -> Callable[..., np.ndarray]:
    """``(num_frames, height, width, start)`` -> uint8 frames that all differ, smooth in space."""

    def make(num_frames: int, height: int = 64, width: int = 96, start: int = 0) -> np.ndarray:
        y, x = np.mgrid[:height, :width]
        frames = [
            np.stack(
                [
                    128 + 100 * np.sin(x / 20 + n / 4),
                    128 + 100 * np.cos(y / 17 - n / 5),
                    128 + 60 * np.sin((x + y) / 25),
                ],
                axis=-1,
            )
            for n in range(start, start + num_frames)
        ]
        return np.stack(frames).astype(np.uint8)

    return make
