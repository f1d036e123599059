"""FlashVSR: low-quality projections, window selection, the streamed network, the tiny decoder, colour correction.

The plugin is imported when a file of its is run, so that all other files can be run where it is not installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from golden import Golden

PARTS = {
    "utils.py": "projection",
    "wan_video_dit.py": "selection",
    "TCDecoder.py": "tiny_decoder",
    "flashvsr_tiny.py": "colour",
}
"""What a file of the original alone stands for."""


def matches(golden: Golden) -> bool:
    return golden.repository.startswith("OpenImagingLab/FlashVSR") and _part(golden) is not None


def run(golden: Golden) -> Iterator[tuple[str, Tensor]]:
    from cases import flashvsr_parts

    return getattr(flashvsr_parts, _part(golden) or "")(golden)


def _part(golden: Golden) -> str | None:
    files = {Path(file).name for file in golden.files}
    if files == {"wan_video_dit.py", "flashvsr_tiny.py"}:
        return "streamed_network"
    return PARTS.get(*files) if len(files) == 1 else None
