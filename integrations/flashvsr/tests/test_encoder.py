"""What the network is given of a video: frames of PIL's bicubic kernel, tokens, and its last frame for ever after."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from flashdreams.config import derive_config
from flashdreams.core.controls import Control, Frame
from flashdreams.infra.layout import ChunkPlan, Layout
from flashvsr._projection import ProjectionCache
from small_flashvsr import narrow

pytestmark = pytest.mark.ci_cpu

CONFIG = derive_config(narrow().encoder, dtype="float32")
HEIGHT, WIDTH = 64, 96


def pictures(count: int, height: int = HEIGHT // 4, width: int = WIDTH // 4, seed: int = 0) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, 256, (height, width, 3), dtype=np.uint8) for _ in range(count)]


def controls(frames: list[np.ndarray]) -> list[Control]:
    return [Control(frame=Frame(frame)) for frame in frames]


@pytest.fixture
def encoder():
    return CONFIG.setup()


def opened(encoder, batch: int = 1):
    return encoder.initialize_cache(Layout(batch, 16, HEIGHT // 8, WIDTH // 8, ChunkPlan(2, 6)))


def test_frames_are_scaled_as_pil_does(encoder) -> None:
    """Within one level of 255, since PIL computes in whole numbers; nearly all are equal."""
    frames = pictures(25)
    scaled = encoder.encode([controls(frames)], 0, 6, opened(encoder)).frames[0].permute(1, 2, 3, 0).int()
    theirs = [Image.fromarray(frame).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC) for frame in frames]
    difference = (scaled - torch.tensor(np.stack([np.array(image) for image in theirs]))[:21].int()).abs()
    assert scaled.shape == (21, HEIGHT, WIDTH, 3)
    assert difference.max() <= 1
    assert (difference == 0).float().mean() > 0.995


def test_a_chunk_has_tokens_of_the_frames_after_its_own_and_its_own_frames(encoder) -> None:
    """A changed frame reaches tokens from its own slice on, one ahead of the decoder's grouping; and no other frame."""
    frames = pictures(33)

    def chunks(frames: list[np.ndarray]) -> list:
        cache = opened(encoder)
        first = encoder.encode([controls(frames[:25])], 0, 6, cache)
        return [first, encoder.encode([controls(frames[21:33])], 6, 8, cache)]

    plain = chunks(frames)
    assert [chunk.tokens.shape for chunk in plain] == [(1, 6, 24, 24), (1, 2, 24, 24)]
    assert [chunk.frames.shape[2] for chunk in plain] == [21, 8]
    changed = chunks([*frames[:22], 255 - frames[22], *frames[23:]])
    differ = [(a.tokens != b.tokens).any(-1).any(-1)[0].tolist() for a, b in zip(plain, changed, strict=True)]
    assert differ == [[False] * 5 + [True], [True, False]], "slices [21, 25) and the two that look back at its end"
    assert torch.equal(plain[0].frames, changed[0].frames)
    assert (plain[1].frames != changed[1].frames).flatten(3).any(-1)[0, 0].tolist() == [False, True] + [False] * 6


def test_version_1_0_carries_nothing_over_and_does_not_see_the_first_frame() -> None:
    encoder = derive_config(CONFIG, carries_past=False).setup()
    frames = pictures(25)
    run = lambda frames: encoder.encode([controls(frames)], 0, 6, opened(encoder)).tokens[0]  # noqa: E731
    plain, first, second = (
        run(frames),
        run([255 - frames[0], *frames[1:]]),
        run([frames[0], 255 - frames[1], *frames[2:]]),
    )
    assert torch.equal(plain, first)
    assert (plain != second).flatten(1).any(1).tolist() == [True] + [False] * 5


@pytest.mark.parametrize("carries_past", [True, False])
def test_slices_may_come_one_by_one_or_together(carries_past: bool) -> None:
    projection = derive_config(CONFIG, carries_past=carries_past, dtype="float64").setup().projection
    video = torch.rand(2, 3, 17, 32, 48, dtype=torch.float64)
    made = []
    for lengths in ([16], [4, 8, 4], [4] * 4):
        projection.begin(video[:, :, :1], cache := ProjectionCache())
        made.append(torch.cat([projection(part, cache) for part in video[:, :, 1:].split(lengths, dim=2)], dim=1))
    for tokens in made:
        torch.testing.assert_close(tokens, made[0], rtol=1e-12, atol=1e-12)


def test_where_the_video_ends_its_last_frame_goes_on(encoder) -> None:
    frames = pictures(27)
    short, long = opened(encoder), opened(encoder)
    for start, stop, first, last in ((0, 6, 0, 25), (6, 8, 21, 33)):
        given = controls(frames[first:last])
        ended = encoder.encode([given + [None] * (last - first - len(given))], start, stop, short)
        repeated = encoder.encode([controls([*frames, *[frames[-1]] * 6][first:last])], start, stop, long)
        assert torch.equal(ended.tokens, repeated.tokens)
        assert torch.equal(ended.frames, repeated.frames)
    nothing = encoder.encode([[None] * 12], 8, 10, short)
    assert (nothing.frames == nothing.frames[:, :, :1]).all()


def test_samples_of_a_batch_are_apart(encoder) -> None:
    both = encoder.encode([controls(pictures(25)), controls(pictures(25, seed=1))], 0, 6, opened(encoder, 2))
    for sample in range(2):
        alone = encoder.encode([controls(pictures(25, seed=sample))], 0, 6, opened(encoder))
        assert torch.equal(both.frames[sample], alone.frames[0])
        torch.testing.assert_close(both.tokens[sample], alone.tokens[0], rtol=1e-5, atol=1e-5)


def test_a_frame_of_another_size_is_refused_with_both_sizes(encoder) -> None:
    with pytest.raises(ValueError, match=r"a frame is 16x20 .* takes frames of 16x24"):
        encoder.encode([controls(pictures(25, 16, 20))], 0, 6, opened(encoder))


def test_without_any_frame_there_is_nothing_to_make_larger(encoder) -> None:
    with pytest.raises(ValueError, match="given no frame"):
        encoder.encode([[None] * 25], 0, 6, opened(encoder))
