"""Walk through a picture: keys held for a chunk each, as an application would send them live.

python integrations/lingbot/examples/walk.py IMAGE [KEYS ...]        such as: street.png w w+left w d
"""

from __future__ import annotations

import sys
from fractions import Fraction

import torch

from flashdreams import load_pipeline
from flashdreams.core.media.image import read_image
from flashdreams.core.media.video import VideoWriter
from flashdreams.core.sizes import area_size


def main(image: str, keys: list[str], output: str = "walk.mp4") -> None:
    """Write a video of one chunk per entry of ``keys``."""
    pipeline = load_pipeline("lingbot-world-fast")
    config = pipeline.config
    pixels = read_image(image).pixels
    height, width = area_size(pixels.shape[:2], config.height * config.width, config.size_multiple)
    rollout = pipeline.rollout(
        "A first-person walk, quiet and detailed", seed=0, num_chunk=len(keys),
        image=torch.from_numpy(pixels), height=height, width=width,
    )  # fmt: skip
    with rollout, VideoWriter(output, Fraction(config.fps).limit_denominator(1001), height, width) as writer:
        for held in keys:
            rollout.set_control(held)
            writer.write(next(rollout).frames.numpy())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:] or ["w", "w", "w+left", "w"])
