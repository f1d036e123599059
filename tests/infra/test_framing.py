"""Size, length and given images of a run, from the flags and the model."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from flashdreams.config import derive_config
from flashdreams.core import notices
from flashdreams.core.media.video import VideoWriter
from flashdreams.infra.config import ExpertConfig
from flashdreams.infra.errors import UserError
from flashdreams.infra.framing import frame_run
from flashdreams.infra.images import from_uint8
from flashdreams.infra.runner import Runner
from flashdreams.infra.scheduler.config import FewStepSchedulerConfig, FlowMatchEulerSchedulerConfig
from flashdreams.recipes.template.config import PIPELINE_TEMPLATE, RUNNER_TEMPLATE

pytestmark = pytest.mark.ci_cpu

FPS = Fraction(16)


@pytest.fixture(autouse=True)
def fresh_notices():
    notices.reset()


def runner(transformer: dict | None = None, pipeline: dict | None = None, **fields):
    changes = {"diffusion_model": {"transformer": transformer or {}}} | (pipeline or {})
    changed = derive_config(PIPELINE_TEMPLATE, **changes)
    return replace(RUNNER_TEMPLATE, pipeline=changed, **fields)


def frame(config):
    return frame_run(config, config.pipeline, FPS)


@pytest.fixture
def wide(tmp_path) -> Path:
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (30, 120, 3), dtype=np.uint8)).save(tmp_path / "wide.png")
    return tmp_path / "wide.png"


def test_a_bidirectional_model_makes_any_length_as_one_chunk(capsys):
    framing = frame(runner({"window_size_t": None, "sink_size_t": 0, "first_len_t": None}, num_frames=10))
    assert (framing.num_chunk, framing.num_frames, framing.latent_frames) == (1, 13, 4)
    assert "num_frames 10 -> 13 frames in 4 latent frames" in capsys.readouterr().err
    with pytest.raises(UserError, match="one chunk; give its length with --num-frames"):
        frame(runner({"window_size_t": None, "sink_size_t": 0}, num_chunk=3))


def test_the_shape_of_an_image_decides_the_size_where_the_model_is_made_so(wide):
    concat = {"window_size_t": None, "sink_size_t": 0, "concat_image_mask_to_latent": True}
    framing = frame(runner(concat, {"image_size": "area"}, image=wide))
    height, width = framing.height, framing.width
    assert (height, width) == (16, 64), "a quarter as high as wide, of about 32 x 48 pixels, in multiples of 16"
    assert framing.image.shape == (30, 120, 3), "the model scales it itself"
    asked = frame(runner(concat, {"image_size": "area"}, image=wide, height=32, width=48))
    assert asked.image.shape == (32, 48, 3)
    fixed = frame(runner({}, image=wide))
    assert (fixed.height, fixed.width) == (32, 48) and fixed.image.shape == (32, 48, 3)


@pytest.mark.parametrize(
    ("transformer", "flags", "message"),
    [
        ({"concat_image_mask_to_latent": True}, {}, "makes a video from an image; give one"),
        ({"takes_last_image": True}, {"image": "wide"}, "give the last one too"),
        ({}, {"image": "wide", "last_image": "wide"}, "takes no last image"),
        ({}, {"image": "wide", "video": "wide"}, "give one of them"),
        ({"stamp_image_latent": True}, {"video": "wide"}, "cannot go on from a clip"),
        ({"window_size_t": None, "sink_size_t": 0}, {"image": "wide"}, "from text alone"),
        ({"window_size_t": None, "sink_size_t": 0}, {"video": "wide"}, "from text alone"),
    ],
)
def test_images_that_a_model_does_not_take_are_named(transformer, flags, message, wide):
    with pytest.raises(UserError, match=message):
        frame(runner(transformer, **dict.fromkeys(flags, wide)))


def test_a_decoder_that_does_not_encode_takes_no_image_in(wide, monkeypatch):
    monkeypatch.setattr(type(PIPELINE_TEMPLATE.decoder), "_target", "flashdreams.infra.decoder:StreamingDecoder")
    with pytest.raises(UserError, match="its decoder does not encode"):
        frame(runner(image=wide))


def write_clip(path: Path, frames: int) -> np.ndarray:
    ramp = np.linspace(0, 255, frames).round().astype(np.uint8)
    video = np.broadcast_to(ramp[:, None, None, None], (frames, 32, 48, 3)).copy()
    with VideoWriter(path, FPS, 32, 48) as writer:
        writer.write(video)
    return video


@pytest.mark.parametrize(("frames", "used"), [(1, 1), (4, 1), (9, 9), (60, 25)])
def test_a_clip_is_gone_on_from_by_its_last_frames(tmp_path, frames, used):
    """As many as the window holds: 7 latent frames are 25 pixel frames here."""
    video = write_clip(tmp_path / "clip.mp4", frames)
    framing = frame(runner(video=tmp_path / "clip.mp4", num_chunk=6))
    assert framing.clip.shape == (used, 32, 48, 3)
    difference = framing.clip.numpy().astype(int) - video[-used:].astype(int)
    assert abs(difference).max() <= 4


def test_a_run_from_a_clip_begins_with_it(tmp_path):
    write_clip(tmp_path / "clip.mp4", 9)
    config = runner(video=tmp_path / "clip.mp4", num_chunk=3, output=tmp_path / "out.mp4", prompt="a", seed=1)
    Runner(config).run()
    plan = Runner(config).plan()
    chunks = list(plan.pipeline.setup().rollout("a", seed=1, num_chunk=3, clip=plan.framing.clip, height=32, width=48))
    given = torch.cat([chunk.latent for chunk in chunks], dim=2)[:, :, :3]
    again = plan.pipeline.setup().encode_video(plan.framing.clip.permute(3, 0, 1, 2)[None].float() / 127.5 - 1)
    assert torch.equal(given, again)
    assert (tmp_path / "out.mp4").stat().st_size > 500


@pytest.mark.parametrize("content", [b"", b"not a video at all"])
def test_what_is_no_video_is_refused(tmp_path, content):
    (tmp_path / "bad.mp4").write_bytes(content)
    with pytest.raises(UserError, match=r"bad\.mp4.*cannot be read"):
        Runner(runner(video=tmp_path / "bad.mp4", prompt="a")).plan()
    with pytest.raises(UserError, match="does not exist"):
        Runner(runner(video=tmp_path / "absent.mp4", prompt="a")).plan()


def test_example_pictures_stand_in_for_the_images_a_model_needs():
    concat = {"window_size_t": None, "sink_size_t": 0, "concat_image_mask_to_latent": True, "takes_last_image": True}
    plan = Runner(runner(concat, example_data=True, prompt="a")).plan()
    assert plan.framing.image.shape == (32, 48, 3)  # cropped to the one size of this model
    assert plan.framing.last_image is not None
    assert Runner(runner({}, example_data=True, prompt="a")).plan().framing.image is None


@pytest.mark.parametrize(("solver", "kind"), [("unipc", "UniPC"), ("dpm++", "DPMPP"), ("euler", "FlowMatchEuler")])
def test_another_solver_takes_the_same_steps(solver, kind):
    scheduler = FlowMatchEulerSchedulerConfig(num_steps=6, shift=3.0)
    config = runner(None, {"diffusion_model": replace(PIPELINE_TEMPLATE.diffusion_model, scheduler=scheduler)})
    for steps in (None, 9):
        chosen = Runner(replace(config, solver=solver, num_steps=steps, prompt="a")).plan().pipeline
        made = chosen.diffusion_model.scheduler
        assert type(made).__name__ == kind + "SchedulerConfig"
        assert (made.num_steps, made.shift) == (steps or 6, 3.0)


def test_a_distilled_model_keeps_its_sampler():
    diffusion_model = replace(PIPELINE_TEMPLATE.diffusion_model, scheduler=FewStepSchedulerConfig())
    with pytest.raises(UserError, match="distilled for its own few steps"):
        Runner(runner(None, {"diffusion_model": diffusion_model}, solver="unipc", prompt="a")).plan()


@pytest.mark.parametrize("rule", ["area", "cells"])
@pytest.mark.parametrize("name", ["tall_disc_90x320.png", "wide_disc_640x60.png"])
def test_a_disc_stays_round_at_a_size_made_for_its_image(name, rule, capsys):
    """B03, for models that take their size from the image: what reaches the model is scaled as published."""
    image = Path(__file__).parents[1] / "cases" / "B03" / name
    concat = {"window_size_t": None, "sink_size_t": 0, "concat_image_mask_to_latent": True}
    framing = frame(runner(concat, {"image_size": rule, "height": 480, "width": 832}, image=image))
    said = capsys.readouterr().err
    assert said.count("so the video is") == 1 and f"{framing.height}x{framing.width}" in said
    pixels = from_uint8(framing.image)
    scaled = F.interpolate(pixels, (framing.height, framing.width), mode="bicubic", align_corners=False)[0]
    disc = (scaled - scaled[:, :1, :1]).abs().sum(0) > 0.75
    rows, columns = disc.any(1).sum().item(), disc.any(0).sum().item()
    assert rows == pytest.approx(columns, rel=0.05)


def test_one_pixel_is_an_image_too():
    image = Path(__file__).parents[1] / "cases" / "B03" / "one_pixel.png"
    concat = {"window_size_t": None, "sink_size_t": 0, "concat_image_mask_to_latent": True}
    framing = frame(runner(concat, {"image_size": "area", "height": 480, "width": 832}, image=image))
    assert (framing.height, framing.width) == (624, 624)


def test_two_transformers_take_two_checkpoints_that_of_low_noise_first():
    model = PIPELINE_TEMPLATE.diffusion_model
    experts = replace(model, high_noise=(ExpertConfig(sigma_low=0.5, transformer=model.transformer),))
    config = runner(None, {"diffusion_model": experts}, prompt="a", guidance_scale=1.0, dtype="bfloat16")

    def paths(ckpt_path):
        made = Runner(replace(config, ckpt_path=ckpt_path))._pipeline_config().diffusion_model
        both = made.transformer, made.high_noise[0].transformer
        assert {(t.dtype, t.guidance_scale) for t in both} == {("bfloat16", 1.0)}
        return [t.checkpoint_path for t in both]

    assert paths("low.pt,high.pt") == ["low.pt", "high.pt"]
    assert paths("random:3") == ["random:3"] * 2
    assert paths(None) == [model.transformer.checkpoint_path] * 2
    with pytest.raises(UserError, match="has 2 transformers, and --ckpt-path names 1"):
        paths("one.pt")
