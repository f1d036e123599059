"""A world under the keys that are typed, a line at a time: every line holds its keys for one chunk (half a second to a
second of video).

    python play.py street.png

Type "w", "w+look-left", "" for nothing, "quit" to stop; the video is written to outputs/play.mp4.
"""

from __future__ import annotations

import sys
from fractions import Fraction
from pathlib import Path

import torch

from flashdreams import load_pipeline
from flashdreams.core.controls import ControlError
from flashdreams.core.media.image import read_image
from flashdreams.core.media.video import VideoWriter

SLUG = "matrix-game-2-universal"


def main(picture: str, output: Path = Path("outputs/play.mp4")) -> None:
    """Play until the input ends."""
    pipeline = load_pipeline(SLUG)
    config, encoder = pipeline.config, pipeline.config.encoder
    assert encoder is not None
    image = torch.from_numpy(read_image(picture, config.height, config.width).pixels)
    writer = VideoWriter(output, Fraction(config.fps).limit_denominator(1001), config.height, config.width)
    with writer, pipeline.rollout(image=image, seed=0) as rollout:
        print(f"This world {encoder.takes.describe()}.", file=sys.stderr)
        for line in sys.stdin:
            keys = line.strip()
            if keys == "quit":
                break
            try:
                rollout.set_control(keys or None)
            except ControlError as error:
                print(error, file=sys.stderr)
                continue
            writer.write(next(rollout).frames.numpy())


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("give a picture: python play.py street.png")
    main(sys.argv[1])
