"""A stream whose prompt changes every 12 chunks, written to one video.

python switch_prompts.py "a cat on a wall" "the cat jumps down" "it runs away"
"""

from __future__ import annotations

import sys
from fractions import Fraction
from pathlib import Path

from flashdreams import load_pipeline
from flashdreams.core.media.video import VideoWriter

CHUNKS = 12


def main(prompts: list[str], output: Path = Path("outputs/prompts.mp4")) -> None:
    """Show the prompts one after the other."""
    pipeline = load_pipeline("self-forcing-t2v-1.3b-long")
    config = pipeline.config
    writer = VideoWriter(output, Fraction(config.fps).limit_denominator(1001), config.height, config.width)
    rollout = pipeline.rollout(prompts[0], seed=0, num_chunk=CHUNKS * len(prompts))
    with writer, rollout:
        for chunk in rollout:
            writer.write(chunk.frames.numpy())
            if (chunk.index + 1) % CHUNKS == 0 and chunk.index + 1 < CHUNKS * len(prompts):
                rollout.set_prompt(prompts[(chunk.index + 1) // CHUNKS], policy="recache")


if __name__ == "__main__":
    main(sys.argv[1:] or ["A ginger cat walks along a garden wall", "The cat jumps down into tall grass"])
