"""Pictures for trying models out (``--example-data``), drawn by :mod:`flashdreams.examples.draw`. Licence: CC0."""

from __future__ import annotations

from pathlib import Path

PROMPT = "A small sailing boat crosses a calm bay at sunset, its reflection trembling on the water, soft warm light"
"""What the pictures show."""
FIRST = Path(__file__).parent / "bay_first.jpg"
LAST = Path(__file__).parent / "bay_last.jpg"
