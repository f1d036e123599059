"""A streaming video-to-video model as a post-processor: any video, in any pieces, frame for frame."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flashdreams.config import ConfigError, derive_config
from flashdreams.core.controls import Frame
from flashdreams.infra.postprocess import PipelinePostprocessorConfig
from flashdreams.infra.postprocess.pipeline import PipelinePostprocessor
from flashdreams.recipes.template.config import PIPELINE_TEMPLATE
from video_model import PIPELINE_VIDEO, POSTPROCESSORS

pytestmark = pytest.mark.ci_cpu


@pytest.fixture(scope="module")
def model() -> PipelinePostprocessor:
    return POSTPROCESSORS["model-x4"].setup()


def video(frames: int, height: int = 8, width: int = 12, seed: int = 0) -> Tensor:
    random = np.random.default_rng(seed)
    return torch.from_numpy(random.integers(0, 256, (frames, height, width, 3), dtype=np.uint8))


def whole(model: PipelinePostprocessor, frames: Tensor, seed: int = 0) -> Tensor:
    """The slow, obvious way: the padded, extended clip is there as a whole, and every chunk of it is made."""
    count, height, width, _ = frames.shape
    chunks = next(n for n in range(100) if PIPELINE_VIDEO.frames_until(n) >= count)
    needed = PIPELINE_VIDEO.frames_until(chunks) + 4
    padding = ((0, needed - count), (0, -height % 4), (0, -width % 4), (0, 0))
    padded = np.pad(frames.numpy(), padding, mode="edge")
    rollout = model.pipeline.rollout(
        seed=seed, num_chunk=chunks, control=[Frame(frame) for frame in padded],
        height=4 * padded.shape[1], width=4 * padded.shape[2],
    )  # fmt: skip
    return torch.cat([chunk.frames for chunk in rollout])[:count, : 4 * height, : 4 * width]


def pieces(model: PipelinePostprocessor, frames: Tensor, sizes: list[int], seed: int = 0) -> list[Tensor]:
    state = model.open(*frames.shape[1:3], Fraction(16), seed)
    return [*(model.push(piece, state) for piece in frames.split(sizes)), model.finish(state)]


@pytest.mark.parametrize("count", [1, 8, 9, 15, 20, 21, 22, 25, 29, 30, 33, 40])
def test_as_many_frames_come_out_as_went_in_and_are_those_of_the_whole_clip(model, count):
    frames = video(count, seed=count)
    out = model.run(frames, seed=5)
    assert out.shape == (count, 32, 48, 3) and out.dtype == torch.uint8
    assert torch.equal(out, whole(model, frames, seed=5))


def test_no_frames_make_no_frames(model):
    assert model.run(video(0)).shape == (0, 32, 48, 3)


@pytest.mark.parametrize("sizes", [[1] * 45, [45], [0, 24, 1, 0, 20], [7, 38], [25, 8, 8, 4], [44, 1, 0]])
def test_any_pieces_give_the_same_video(model, sizes):
    frames = video(45)
    made = pieces(model, frames, sizes)
    assert torch.equal(torch.cat(made), model.run(frames))


def test_frames_are_handed_out_as_soon_as_their_chunk_can_be_made(model):
    made = pieces(model, video(45), [1] * 45)
    assert {i: len(piece) for i, piece in enumerate(made) if len(piece)} == {24: 21, 32: 8, 40: 8, 45: 8}


@pytest.mark.parametrize(("height", "width"), [(61, 97), (1, 1), (3, 5), (4, 4)])
def test_a_size_the_model_cannot_make_is_padded_and_cropped_to_exactly_four_times(model, height, width):
    frames = video(9, height, width)
    out = model.run(frames)
    assert out.shape == (9, 4 * height, 4 * width, 3)
    assert torch.equal(out, whole(model, frames))


def test_a_chunk_sees_its_look_ahead_and_nothing_beyond(model):
    frames = video(33)
    seen, unseen = frames.clone(), frames.clone()
    seen[24], unseen[25] = 255 - seen[24], 255 - unseen[25]
    first, other, same = (model.run(clip)[:21] for clip in (frames, seen, unseen))
    assert not torch.equal(first, other)
    assert torch.equal(first, same)


def test_the_seed_counts_and_videos_interleave(model):
    clips = video(30, seed=1), video(30, 12, 8, seed=2)
    assert not torch.equal(model.run(clips[0], seed=1), model.run(clips[0], seed=2))
    states = [model.open(*clip.shape[1:3], Fraction(16), 7) for clip in clips]
    made: list[list[Tensor]] = [[], []]
    for i in range(0, 30, 5):
        for k, clip in enumerate(clips):
            made[k].append(model.push(clip[i : i + 5], states[k]))
    for k, clip in enumerate(clips):
        made[k].append(model.finish(states[k]))
        assert torch.equal(torch.cat(made[k]), model.run(clip, seed=7))


def tensors(tree: Any) -> int:
    """Bytes of every tensor in a tree of state."""
    if isinstance(tree, Tensor):
        return tree.nbytes
    if is_dataclass(tree):
        return sum(tensors(getattr(tree, field.name)) for field in fields(tree))
    if isinstance(tree, dict):
        return sum(map(tensors, tree.values()))
    return sum(map(tensors, tree)) if isinstance(tree, (list, tuple)) else 0


def test_memory_does_not_grow_with_the_video(model):
    frames = video(120)
    state = model.open(8, 12, Fraction(16))
    held, waiting = [], []
    for piece in frames.split(8):
        model.push(piece, state)
        held.append(tensors(state.rollout.cache))
        waiting.append(len(state.queue.kept))
    assert max(waiting) < 21 + 8 + 4
    assert held[-1] == held[-4] and held[-1] > 0, "after the window has filled"
    assert len(model.finish(state)) == 120 - 109


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"encoder": None}, "has no encoder"),
        ({"decoder": None}, "has no decoder"),
        ({"encoder": {"scale": 2}}, "scale is 4, but its encoder's is 2; set both to one number"),
        ({"encoder": PIPELINE_TEMPLATE.encoder}, "takes no video frames"),
        ({"diffusion_model": {"transformer": {"window_size_t": None}}}, "as one chunk"),
    ],
)
def test_a_model_that_cannot_work_on_a_video_is_refused(changes, message):
    pipeline = derive_config(PIPELINE_VIDEO, **changes)
    with pytest.raises(ConfigError, match=message):
        PipelinePostprocessorConfig(name="x", description="x", pipeline=pipeline).setup()
