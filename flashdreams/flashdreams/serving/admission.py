"""How many sessions there is room for, by number and by memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

RESERVE = 0.9
"""Part of the free memory that sessions may take."""


@dataclass(frozen=True)
class Room:
    """``state``: bytes that a session of ``pixels`` keeps; ``free``: bytes for all of them. ``None``: not known."""

    max_sessions: int
    pixels: int
    state: int | None = None
    free: int | None = None

    @classmethod
    def of(cls, max_sessions: int, pixels: int, ready: dict[str, Any]) -> Room:
        """From what a worker said when it was ready, with no session open."""
        return cls(max_sessions, pixels, ready.get("state"), ready.get("free"))

    def cost(self, height: int, width: int) -> int:
        """Bytes of a session of this size; keys, values and latents grow with the number of pixels."""
        return -(-(self.state or 0) * height * width // self.pixels)

    def refusal(self, held: list[int], height: int, width: int) -> str | None:
        """Why there is no room beside sessions that hold so many bytes each; ``None`` where there is."""
        if len(held) >= self.max_sessions:
            return f"all {self.max_sessions} sessions are taken; try again later"
        if self.state is None or self.free is None:
            return None
        need, left = self.cost(height, width), int(self.free * RESERVE) - sum(held)
        if need > left:
            return (
                f"a session of {height}x{width} needs {need / 2**20:.0f} MiB, and {max(0, left) / 2**20:.0f} MiB of "
                f"the device's memory are left beside {len(held)} sessions; try again later, or a smaller size"
            )
        return None
