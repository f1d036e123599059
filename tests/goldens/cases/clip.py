"""The CLIP vision tower: preprocessing, and the tokens after the last block and the one before it."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from flashdreams.recipes.wan.clip import CLIPImageEncoder
from flashdreams.recipes.wan.clip_config import CLIPVisionConfig
from golden import Golden

SIZES = ("image_size", "patch_size", "dim", "mlp_ratio", "out_dim", "num_heads", "num_layers", "norm_eps")


def matches(golden: Golden) -> bool:
    return golden.repository.startswith("Wan-Video/") and golden.files == ("wan/modules/clip.py",)


def run(golden: Golden) -> Iterator[tuple[str, Tensor]]:
    encoder = CLIPImageEncoder(CLIPVisionConfig(**{name: golden.config[name] for name in SIZES}))
    encoder.visual.load_state_dict(golden.weights["model"])
    images = golden.inputs["pixels"]
    pixels = encoder.preprocess(images)
    yield "preprocessed", pixels
    yield "penultimate", encoder.encode(images)
    yield "last", encoder.visual(pixels, golden.config["num_layers"])
