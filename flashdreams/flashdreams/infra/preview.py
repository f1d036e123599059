"""The frames of a contact sheet, gathered while a video is made."""

from __future__ import annotations

import numpy as np


class FrameSample:
    """Evenly spaced frames of a run of unknown length, in constant memory: every n-th, n doubling as needed."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.stride = 1
        self.seen = 0
        self.kept: list[np.ndarray] = []

    def add(self, frames: np.ndarray) -> None:
        """Look at the next frames ``[T, H, W, 3]``."""
        for frame in frames:
            if self.seen % self.stride == 0:
                self.kept.append(frame)
            self.seen += 1
            if len(self.kept) > 2 * self.count:
                self.kept, self.stride = self.kept[::2], 2 * self.stride

    def frames(self) -> np.ndarray:
        """Those that were kept."""
        return np.stack(self.kept)
