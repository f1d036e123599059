"""TI2V-5B on a shrunken model: the first frame stands in the sample, against the published loop written out."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

from flashdreams.config import derive_config
from flashdreams.core.noise import GivenNoise
from flashdreams.core.rope import rope_3d
from flashdreams.infra.framing import frame_run
from flashdreams.infra.pipeline import StreamInferencePipeline
from flashdreams.recipes.wan.conditions import WanConditions
from flashdreams.recipes.wan.network import ChunkContext, NetworkCache
from wan22.config import WAN22_CONFIGS

pytestmark = pytest.mark.ci_cpu

SLUG = "wan22-ti2v-5b"
FRAMES, ROWS, COLUMNS = 3, 4, 6


@pytest.fixture
def pipeline(shrunk) -> StreamInferencePipeline:
    return shrunk(SLUG).pipeline.setup()


def noise(seed: int = 0) -> Tensor:
    return torch.randn(1, 48, FRAMES, ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def reference(pipeline: StreamInferencePipeline, prompt: WanConditions, start: Tensor, image: Tensor | None) -> Tensor:
    """The published loop: mix before it and after every step; a timestep for each token; guidance by two passes."""
    model = pipeline.diffusion_model
    network, scheduler = model.transformer.network, model.scheduler
    mask = torch.ones_like(start)
    known = torch.zeros_like(start)
    if image is not None:
        mask[:, :, 0] = 0
        pixels = image.permute(2, 0, 1).float() / 127.5 - 1
        known = pipeline.decoder.encode(pixels[None, :, None], pipeline.decoder.initialize_cache())
    context = ChunkContext(rope_3d(range(FRAMES), ROWS // 2, COLUMNS // 2, network.config.head_dim))
    texts = [NetworkCache(network.encode_text(text)) for text in (prompt.text, prompt.negative_text)]
    x = (1 - mask) * known + mask * start
    state = scheduler.begin()
    for step in scheduler.steps:
        timesteps = (mask[:, 0, :, ::2, ::2] * step.timestep).flatten(1)
        conditional, unconditional = (network(x, timesteps, context, text) for text in texts)
        flow = unconditional + 5.0 * (conditional - unconditional)
        x = scheduler.transition(x, flow, step, lambda: None, state)
        x = (1 - mask) * known + mask * x
    return x


@pytest.mark.parametrize("from_image", [False, True])
def test_the_result_is_that_of_the_published_loop(pipeline, prompt, picture, from_image: bool) -> None:
    image = picture(64, 96) if from_image else None
    rollout = pipeline.rollout(conditions=prompt, image=image, num_frames=9, noise=GivenNoise(noise()))
    (chunk,) = rollout
    want = reference(pipeline, prompt, noise(), image)
    torch.testing.assert_close(chunk.latent, want, rtol=1e-4, atol=1e-4)
    assert (chunk.latent - noise()).abs().max() > 0.1


def test_the_first_latent_frame_of_the_result_is_the_images_exactly(pipeline, prompt, picture) -> None:
    image = picture(64, 96)
    (chunk,) = pipeline.rollout(conditions=prompt, image=image, num_frames=9, seed=4)
    encoded = pipeline.encode_video(image.permute(2, 0, 1)[None, :, None].float() / 127.5 - 1)
    assert torch.equal(chunk.latent[:, :, :1], encoded)
    assert chunk.frames.shape == (1, 9, 64, 96, 3)


def test_tokens_of_the_first_frame_are_told_that_they_are_clean(pipeline, prompt, picture) -> None:
    told: list[Tensor] = []
    network = pipeline.diffusion_model.transformer.network
    network.register_forward_pre_hook(lambda _, arguments: told.append(arguments[1].clone()))
    list(pipeline.rollout(conditions=prompt, image=picture(64, 96), num_frames=9))
    steps = [step.timestep for step in pipeline.diffusion_model.scheduler.steps]
    assert len(told) == 2 * len(steps)
    for timesteps, step in zip(told[::2], steps, strict=True):
        assert timesteps.view(1, FRAMES, -1)[0, :, 0].tolist() == [0, step, step]


def test_text_alone_and_another_image_make_other_videos(pipeline, prompt, picture) -> None:
    images = None, picture(64, 96), picture(64, 96, seed=1)
    latents = [
        next(iter(pipeline.rollout(conditions=prompt, image=image, num_frames=9, seed=2))).latent for image in images
    ]
    for i in range(3):
        assert not torch.allclose(latents[i][:, :, 1:], latents[i - 1][:, :, 1:], atol=1e-3), "later frames see it"


def published_size(width: int, height: int, area: int, cell: int) -> tuple[int, int]:
    """Height and width of an image's shape in whole cells: width first or height first, whichever distorts less."""
    ratio = width / height
    ideal_width = (area * ratio) ** 0.5
    ideal_height = area / ideal_width
    width_first = int(ideal_width // cell * cell)
    width_first = width_first, int(area / width_first // cell * cell)
    height_first = int(ideal_height // cell * cell)
    height_first = int(area / height_first // cell * cell), height_first
    a, b = (max(ratio / (w / h), (w / h) / ratio) for w, h in (width_first, height_first))
    chosen = width_first if a < b else height_first
    return chosen[1], chosen[0]


@pytest.mark.parametrize("size", [(60, 40), (40, 60), (50, 50), (30, 97), (704, 1280)])
def test_the_size_follows_the_image_in_cells_of_32(size, picture, tmp_path: Path) -> None:
    Image.fromarray(picture(*size).numpy()).save(tmp_path / "image.png")
    runner = derive_config(WAN22_CONFIGS[SLUG], image=tmp_path / "image.png")
    framing = frame_run(runner, runner.pipeline, Fraction(24))
    assert (framing.height, framing.width) == published_size(size[1], size[0], 704 * 1280, 32)
    assert framing.image.shape == (framing.height, framing.width, 3)
    assert framing.num_frames == 121


def test_text_alone_has_the_models_own_size() -> None:
    framing = frame_run(WAN22_CONFIGS[SLUG], WAN22_CONFIGS[SLUG].pipeline, Fraction(24))
    assert (framing.height, framing.width, framing.latent_frames) == (704, 1280, 31)
