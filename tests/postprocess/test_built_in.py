"""The post-processors that come with the runtime, and several in a row."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from flashdreams.config import ConfigError, derive_config
from flashdreams.infra.postprocess import UNCHANGED, ChainConfig
from flashdreams.recipes.filters.config import POSTPROCESSORS

pytestmark = pytest.mark.ci_cpu

CHAINS = {
    "nothing": UNCHANGED,
    **POSTPROCESSORS,
    "two": ChainConfig(stages=(POSTPROCESSORS["blend-x2"], POSTPROCESSORS["lanczos-x2"])),
    "twice": ChainConfig(stages=(POSTPROCESSORS["blend-x2"], POSTPROCESSORS["blend-x2"])),
}


def video(frames: int, height: int = 5, width: int = 7) -> Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(0, 256, (frames, height, width, 3), dtype=np.uint8))


@pytest.mark.parametrize("name", CHAINS)
@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(st.integers(0, 4), max_size=6))
def test_any_pieces_give_the_video_that_the_config_foretells(name, sizes):
    config = CHAINS[name]
    module, frames = config.setup(), video(sum(sizes))
    state = module.open(5, 7, Fraction(24))
    pieces = [module.push(piece, state) for piece in frames.split(sizes)] if sizes else []
    out = torch.cat([*pieces, module.finish(state)])
    assert out.dtype == torch.uint8
    assert out.shape == (config.output_frames(len(frames)), *config.output_size(5, 7), 3)
    assert config.output_frames(len(frames)) / config.output_fps(Fraction(24)) == len(frames) / Fraction(24)
    assert torch.equal(out, module.run(frames))


def test_blending_keeps_every_frame_and_puts_means_between():
    frames = video(4)
    out = POSTPROCESSORS["blend-x2"].setup().run(frames)
    assert torch.equal(out[::2], frames)
    for i in range(3):
        mean = torch.floor((frames[i].double() + frames[i + 1].double()) / 2 + 0.5)
        assert torch.equal(out[2 * i + 1], mean.to(torch.uint8))
    assert torch.equal(out[7], frames[3])


@pytest.mark.parametrize(
    ("name", "scale", "kernel"),
    [("lanczos-x2", 2, Image.Resampling.LANCZOS), ("bicubic-x4", 4, Image.Resampling.BICUBIC)],
)
def test_resizing_is_that_of_the_image_library(name, scale, kernel):
    frames = video(2)
    out = POSTPROCESSORS[name].setup().run(frames)
    for made, frame in zip(out, frames, strict=True):
        assert np.array_equal(made, Image.fromarray(frame.numpy()).resize((7 * scale, 5 * scale), kernel))


def test_a_chain_is_its_stages_one_after_another():
    frames = video(3)
    blended = POSTPROCESSORS["blend-x2"].setup().run(frames)
    assert torch.equal(CHAINS["two"].setup().run(frames), POSTPROCESSORS["lanczos-x2"].setup().run(blended))
    assert torch.equal(UNCHANGED.setup().run(frames), frames)


def test_a_scale_out_of_range_is_refused():
    with pytest.raises(ConfigError, match="scale is 17; expected 1 to 16"):
        derive_config(POSTPROCESSORS["bicubic-x4"], scale=17).setup()
