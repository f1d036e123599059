"""TI2V-5B from Python: a first image (or none) and a prompt to frames.

python integrations/wan22/examples/from_python.py [IMAGE]
"""

from __future__ import annotations

import sys
from fractions import Fraction

import torch

from flashdreams import load_pipeline
from flashdreams.core.media.image import read_image
from flashdreams.core.media.video import VideoWriter
from flashdreams.core.sizes import cells_size

pipeline = load_pipeline("wan22-ti2v-5b")
height, width = pipeline.config.height, pipeline.config.width
image = None
if len(sys.argv) > 1:
    shape = read_image(sys.argv[1]).pixels.shape
    height, width = cells_size(shape[:2], height * width, pipeline.config.size_multiple)
    image = torch.from_numpy(read_image(sys.argv[1], height, width).pixels)

(chunk,) = pipeline.rollout(
    "A ginger cat walks along a garden wall at sunset", seed=0, image=image, height=height, width=width
)
with VideoWriter("wan22.mp4", Fraction(24), height, width) as writer:
    writer.write(chunk.frames.numpy())
