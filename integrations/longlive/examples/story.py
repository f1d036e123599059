"""A video of several prompts, one a line of a text file, each for ten seconds.

python story.py story.txt
"""

from __future__ import annotations

import sys
from fractions import Fraction
from pathlib import Path

from flashdreams import load_pipeline
from flashdreams.core.media.video import VideoWriter

SECONDS = 10


def main(story: Path, output: Path = Path("outputs/story.mp4")) -> None:
    """Tell the story."""
    prompts = [line.strip() for line in story.read_text(encoding="utf-8").splitlines() if line.strip()]
    pipeline = load_pipeline("longlive-t2v-1.3b")
    config = pipeline.config
    writer = VideoWriter(output, Fraction(config.fps).limit_denominator(1001), config.height, config.width)
    shown = 0
    with writer, pipeline.rollout(prompts[0], seed=0) as rollout:
        for chunk in rollout:
            writer.write(chunk.frames.numpy())
            due = int(rollout.frame / config.fps / SECONDS)
            if due >= len(prompts):
                break
            if due > shown:
                rollout.set_prompt(prompts[due])
                shown = due


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "story.txt"))
