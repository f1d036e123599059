"""A world that goes on from the last five frames of a video, from Python.

python integrations/cosmos_predict2/examples/go_on_from_clip.py VIDEO
"""

from __future__ import annotations

import sys
from fractions import Fraction

import torch

from flashdreams import load_pipeline
from flashdreams.core.media.clip import read_clip
from flashdreams.core.media.video import VideoWriter

pipeline = load_pipeline("cosmos-predict2.5-2b")
height, width = pipeline.config.height, pipeline.config.width
clip = torch.from_numpy(read_clip(sys.argv[1], height, width, 5, 4))
prompt = "The delivery robot turns left at the crossing and rolls on along the wet street"
(chunk,) = pipeline.rollout(prompt, clip=clip, seed=0)
with VideoWriter("cosmos.mp4", Fraction(16), height, width) as writer:
    writer.write(chunk.frames.numpy())
