"""What a picture becomes: the condition beside the sample, and the tokens that cross-attention reads."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from flashdreams.config import derive_config
from flashdreams.infra.framing import frame_run
from flashdreams.infra.images import from_uint8
from flashdreams.infra.pipeline import StreamInferencePipeline
from matrix_game_2.config import MATRIX_GAME_2_CONFIGS

pytestmark = pytest.mark.ci_cpu

SLUG = "matrix-game-2-universal"
CHUNKS = 9
FRAMES = 3 * CHUNKS


def test_every_chunk_is_given_its_part_of_the_whole_clip(shrunk, picture: Tensor) -> None:
    """Reference: the picture and grey frames up to the end of the run, encoded at once, and four channels of flags."""
    pipeline = shrunk(SLUG).pipeline.setup()
    with torch.no_grad():
        clip = torch.zeros(1, 3, 1 + 4 * (FRAMES - 1), 32, 48)
        clip[:, :, 0] = from_uint8(picture)
        want = pipeline.decoder.encode(clip, pipeline.decoder.initialize_cache())
    seen: list[Tensor] = []
    network = pipeline.diffusion_model.transformer.network
    hook = network.patch_embedding.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0].clone()))
    with pipeline.rollout(image=picture, num_chunk=CHUNKS) as rollout:
        kept = rollout.cache.conditions.image_latent.shape[2]
        pipeline.decode = lambda *_: torch.zeros(1, 3, 1, 8, 8)  # pixels are not looked at
        list(rollout)
    hook.remove()
    assert kept < FRAMES, "the stream goes on beyond what is kept"
    passes = [4] * (CHUNKS - 1) + [3]  # three steps, and a commit but for the last
    chunks = [chunk for chunk, count in enumerate(passes) for _ in range(count)]
    for chunk, given in zip(chunks, seen, strict=True):
        assert given.shape == (1, 36, 3, 4, 6)
        flags = torch.zeros(4, 3, 4, 6)
        flags[:, 0] = float(chunk == 0)
        assert torch.equal(given[0, 16:20], flags)
        torch.testing.assert_close(given[0, 20:], want[0, :, 3 * chunk : 3 * chunk + 3], rtol=1e-5, atol=1e-5)


def test_the_vision_encoder_sees_the_same_picture_and_is_all_that_is_attended_to(pipeline, picture: Tensor) -> None:
    with pipeline.rollout(image=picture) as rollout:
        tokens = pipeline.image_encoder.encode(from_uint8(picture))
        torch.testing.assert_close(rollout.cache.conditions.image_embed, tokens)
        assert rollout.cache.conditions.text is None
        block = rollout.cache.experts[0].branches[0].blocks[0]
        network = pipeline.diffusion_model.transformer.network
        k, v = network.blocks[0].cross_attn.encode(network.img_emb(tokens))
        torch.testing.assert_close(block.text_k, k)
        torch.testing.assert_close(block.text_v, v)
        assert block.image_k is None


@pytest.mark.parametrize("size", [(352, 640), (700, 640), (100, 400), (720, 1280)])
def test_a_picture_of_any_shape_fills_the_frame_undistorted(size: tuple[int, int], tmp_path: Path) -> None:
    """Scaled until it covers 352x640 and cropped on both sides alike: of a gradient, the middle stays in the middle."""
    rows, columns = np.meshgrid(np.linspace(0, 255, size[0]), np.linspace(0, 255, size[1]), indexing="ij")
    Image.fromarray(np.stack((rows, columns, 0 * rows), -1).round().astype(np.uint8)).save(tmp_path / "picture.png")
    runner = MATRIX_GAME_2_CONFIGS[SLUG]
    framing = frame_run(derive_config(runner, image=tmp_path / "picture.png"), runner.pipeline, Fraction(12))
    assert (framing.height, framing.width) == (352, 640)
    pixels = framing.image.double()
    assert pixels.shape == (352, 640, 3)
    scale = max(352 / size[0], 640 / size[1])
    for axis, length, out in ((0, size[0], 352), (1, size[1], 640)):
        line = pixels[..., axis].mean(1 - axis)
        assert line.mean() == pytest.approx(127.5, abs=1)
        assert (line[-1] - line[0]).item() == pytest.approx(255 * out / (length * scale), abs=2)


def test_another_size_is_taken_for_what_it_is(pipeline: StreamInferencePipeline, picture: Tensor) -> None:
    """The original insists on 880 tokens to a frame; nothing in the model depends on it."""
    tall = torch.cat((picture, picture), dim=0)
    (chunk,) = pipeline.rollout(image=tall, height=64, width=48, num_chunk=1)
    assert chunk.frames.shape == (9, 64, 48, 3)
