"""Image to video on shrunken models: what reaches the network, against a slow reference of the publication."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

from flashdreams.config import derive_config
from flashdreams.infra.framing import frame_run
from flashdreams.infra.pipeline import StreamInferencePipeline
from wan21.config import WAN21_CONFIGS

pytestmark = pytest.mark.ci_cpu

I2V, FLF2V = "wan21-i2v-14b-480p", "wan21-flf2v-14b-720p"
HEIGHT, WIDTH, LATENT_FRAMES = 32, 48, 3


def cubic_weights(size: int, new: int) -> Tensor:
    """Matrix ``[new, size]`` of bicubic interpolation with Keys' kernel of -0.75; samples beyond the edge are those at
    it."""
    a, matrix = -0.75, torch.zeros(new, size, dtype=torch.float64)
    for row in range(new):
        centre = (row + 0.5) * size / new - 0.5
        for tap in range(math.floor(centre) - 1, math.floor(centre) + 3):
            x = abs(centre - tap)
            weight = (
                (a + 2) * x**3 - (a + 3) * x**2 + 1 if x <= 1
                else a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a if x < 2
                else 0
            )  # fmt: skip
            matrix[row, min(max(tap, 0), size - 1)] += weight
    return matrix


def resized(image: Tensor) -> Tensor:
    """``[3, HEIGHT, WIDTH]`` in [-1, 1] and a little beyond: bicubic overshoot is kept."""
    pixels = (image.permute(2, 0, 1).double() / 255 - 0.5) / 0.5
    rows, columns = cubic_weights(image.shape[0], HEIGHT), cubic_weights(image.shape[1], WIDTH)
    return torch.einsum("hy,cyx,wx->chw", rows, pixels, columns).float()


def reference_condition(pipeline: StreamInferencePipeline, first: Tensor, last: Tensor | None) -> Tensor:
    """``[20, T, h, w]``: the flags of given pixel frames, four to a latent frame, then the latents of the clip."""
    count = 1 + 4 * (LATENT_FRAMES - 1)
    clip, flags = torch.zeros(3, count, HEIGHT, WIDTH), [0] * count
    clip[:, 0], flags[0] = resized(first), 1
    if last is not None:
        clip[:, -1], flags[-1] = resized(last), 1
    flags = [flags[0]] * 3 + flags
    mask = torch.zeros(4, LATENT_FRAMES, HEIGHT // 8, WIDTH // 8)
    for frame in range(LATENT_FRAMES):
        for channel in range(4):
            mask[channel, frame] = flags[4 * frame + channel]
    cache = pipeline.decoder.initialize_cache()
    pieces = [pipeline.decoder.encode(piece[None], cache)[0] for piece in clip.split([1, 4, 4], dim=1)]
    return torch.cat((mask, torch.cat(pieces, dim=1)))


def inputs_of_the_network(pipeline: StreamInferencePipeline, **request) -> list[Tensor]:
    """What the network is given in every call of a rollout, ``[1, 36, T, h, w]``."""
    seen: list[Tensor] = []
    network = pipeline.diffusion_model.transformer.network
    hook = network.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0].clone()))
    list(pipeline.rollout(num_frames=9, **request))
    hook.remove()
    return seen


@pytest.mark.parametrize(("slug", "images"), [(I2V, 1), (FLF2V, 2)])
def test_the_condition_is_that_of_the_publication(shrunk, prompt, picture, slug: str, images: int) -> None:
    pipeline = shrunk(slug).pipeline.setup()
    first, last = picture(20, 30), picture(50, 41, seed=1) if images == 2 else None
    seen = inputs_of_the_network(pipeline, conditions=prompt, image=first, last_image=last)
    assert len(seen) == 3 * 2, "three steps of two guidance branches"
    with torch.no_grad():
        want = reference_condition(pipeline, first, last)
    for given in seen:
        assert given.shape == (1, 36, LATENT_FRAMES, HEIGHT // 8, WIDTH // 8)
        assert torch.equal(given[0, 16:20], want[:4])
        torch.testing.assert_close(given[0, 20:], want[4:], rtol=1e-4, atol=1e-4)
    assert not torch.equal(seen[0][:, :16], seen[2][:, :16]), "the sample comes first, and moves"


@pytest.mark.parametrize(("slug", "last_frame"), [(I2V, [0, 0, 0, 0]), (FLF2V, [0, 0, 0, 1])])
def test_the_mask_marks_four_pixel_frames_in_each_latent_frame(shrunk, prompt, picture, slug, last_frame) -> None:
    pipeline = shrunk(slug).pipeline.setup()
    last = picture(32, 48, seed=1) if slug == FLF2V else None
    mask = inputs_of_the_network(pipeline, conditions=prompt, image=picture(32, 48), last_image=last)[0][0, 16:20]
    assert mask[:, :, 0, 0].T.tolist() == [[1, 1, 1, 1], [0, 0, 0, 0], last_frame]
    assert torch.equal(mask, mask[:, :, :1, :1].expand_as(mask)), "constant over the picture"


def test_clip_sees_each_image_in_its_own_size_first_before_last(shrunk, prompt, picture) -> None:
    pipeline = shrunk(FLF2V).pipeline.setup()
    images = picture(20, 30), picture(50, 41, seed=1)
    with pipeline.rollout(conditions=prompt, image=images[0], last_image=images[1], num_frames=9) as rollout:
        embed = rollout.cache.conditions.image_embed
    with torch.no_grad():
        each = [pipeline.image_encoder.encode(i.permute(2, 0, 1)[None].float() / 127.5 - 1) for i in images]
    torch.testing.assert_close(embed, torch.cat(each, dim=1))
    assert embed.shape == (1, 10, 16)


@pytest.mark.parametrize("slug", [I2V, FLF2V])
def test_every_image_and_the_vision_encoder_change_the_video(shrunk, prompt, picture, slug: str) -> None:
    pipeline = shrunk(slug).pipeline.setup()
    images = {"image": picture(32, 48)} | ({"last_image": picture(32, 48, seed=1)} if slug == FLF2V else {})

    def latent(**changes: Tensor) -> Tensor:
        return next(iter(pipeline.rollout(conditions=prompt, seed=3, num_frames=9, **images | changes))).latent

    plain = latent()
    assert torch.equal(latent(), plain)
    for name in images:
        assert not torch.allclose(latent(**{name: picture(32, 48, seed=9)}), plain, atol=1e-3), name
    pipeline.diffusion_model.transformer.network.img_emb.proj[4].weight.mul_(3)
    assert not torch.allclose(latent(), plain, atol=1e-3)


def test_a_missing_image_is_refused_and_so_is_one_too_many(shrunk, prompt, picture) -> None:
    i2v, flf2v = shrunk(I2V).pipeline.setup(), shrunk(FLF2V).pipeline.setup()
    with pytest.raises(ValueError, match="image"):
        i2v.rollout(conditions=prompt, num_frames=9)
    with pytest.raises(ValueError, match="last"):
        flf2v.rollout(conditions=prompt, image=picture(32, 48), num_frames=9)
    with pytest.raises(ValueError, match="last"):
        i2v.rollout(conditions=prompt, image=picture(32, 48), last_image=picture(32, 48), num_frames=9)


@pytest.mark.parametrize("slug", [I2V, "wan21-i2v-14b-720p", FLF2V])
@pytest.mark.parametrize("size", [(60, 40), (40, 60), (50, 50), (30, 97)])
def test_the_size_follows_the_image_at_the_published_area(slug: str, size, picture, tmp_path: Path) -> None:
    Image.fromarray(picture(*size).numpy()).save(tmp_path / "image.png")
    runner = WAN21_CONFIGS[slug]
    images = {"image": tmp_path / "image.png"} | ({"last_image": tmp_path / "image.png"} if slug == FLF2V else {})
    framing = frame_run(derive_config(runner, **images), runner.pipeline, Fraction(16))
    area, ratio = (480 * 832 if slug == I2V else 720 * 1280), size[0] / size[1]
    rows, columns = math.sqrt(area * ratio) // 8 // 2 * 2, math.sqrt(area / ratio) // 8 // 2 * 2
    assert (framing.height, framing.width) == (8 * rows, 8 * columns)
    assert framing.image.shape == (*size, 3), "the model scales it itself, and CLIP sees it as it is"
    assert framing.num_frames == 81
