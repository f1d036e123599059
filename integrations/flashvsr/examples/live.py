"""Another model's frames four times as large, while it makes them, written to one video.

python live.py "a red circle moves right on a blue background"
"""

from __future__ import annotations

import sys
from fractions import Fraction
from pathlib import Path

from flashdreams import load_pipeline
from flashdreams.core.media.video import VideoWriter
from flashdreams.plugins.registry import get_postprocessor

MODEL, ENLARGER = "tiny-world", "flashvsr-x4"


def main(prompt: str, output: Path = Path("outputs/live.mp4"), chunks: int = 16, device: str = "cuda") -> None:
    """Frames come out as soon as the enlarger has the 4 after them that it looks ahead at; the rest at the end."""
    pipeline = load_pipeline(MODEL, device=device)
    enlarger = get_postprocessor(ENLARGER).setup(device=device)
    fps = Fraction(pipeline.config.fps).limit_denominator(1001)
    size = pipeline.config.height, pipeline.config.width
    state = enlarger.open(*size, fps)
    with VideoWriter(output, fps, *enlarger.config.output_size(*size)) as writer:
        for chunk in pipeline.rollout(prompt, seed=0, num_chunk=chunks):
            writer.write(enlarger.push(chunk.frames, state).numpy())
        writer.write(enlarger.finish(state).numpy())


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "a red circle moves right on a blue background")
