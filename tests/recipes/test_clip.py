"""The CLIP image encoder: published keys, preprocessing as published. (transformers' numbers: ``tests/parity``.)"""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from flashdreams.config import ConfigError
from flashdreams.recipes.wan.clip import MEAN, STD, CLIPImageEncoder
from flashdreams.recipes.wan.clip_config import CLIPVisionConfig
from flashdreams.recipes.wan.keymaps import CLIP_VISUAL

pytestmark = pytest.mark.ci_cpu

DATA = Path(__file__).parent / "data"
SMALL = CLIPVisionConfig(
    image_size=28, patch_size=14, dim=32, mlp_ratio=2, out_dim=16, num_heads=4, num_layers=3, dtype="float32"
)


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1


@pytest.fixture(scope="module")
def encoder() -> CLIPImageEncoder:
    return SMALL.setup()


def test_the_published_file_without_its_text_tower_has_our_keys_and_shapes():
    with torch.device("meta"):
        encoder = CLIPImageEncoder(CLIPVisionConfig())
    published = json.loads(gzip.decompress((DATA / "clip-xlmr-vit-h14-full.native.json.gz").read_bytes()))
    shapes = CLIP_VISUAL.shapes({key: entry["shape"] for key, entry in published["tensors"].items()})
    assert shapes == {key: tuple(weight.shape) for key, weight in encoder.state_dict().items()}
    assert len(shapes) == 392 < len(published["tensors"])


def test_an_image_becomes_a_class_token_and_a_token_per_patch(encoder: CLIPImageEncoder):
    assert encoder.encode(random(2, 3, 20, 36)).shape == (2, SMALL.num_tokens, SMALL.dim)
    assert SMALL.num_tokens == 5 and CLIPVisionConfig().num_tokens == 257


def test_any_shape_is_squeezed_to_a_square_not_cropped(encoder: CLIPImageEncoder):
    """Left and right halves of a wide picture fill the halves of the square; brightness is CLIP's."""
    image = torch.cat((torch.full((1, 3, 28, 70), -1.0), torch.full((1, 3, 28, 70), 1.0)), dim=3)
    pixels = encoder.preprocess(image)
    assert pixels.shape == (1, 3, 28, 28)
    for channel, (mean, std) in enumerate(zip(MEAN, STD)):
        torch.testing.assert_close(pixels[0, channel, :, :10], torch.full((28, 10), (0 - mean) / std))
        torch.testing.assert_close(pixels[0, channel, :, -10:], torch.full((28, 10), (1 - mean) / std))


def test_the_last_block_the_last_norm_and_the_head_have_no_part(encoder: CLIPImageEncoder):
    other = CLIPImageEncoder(SMALL).requires_grad_(False)
    other.load_state_dict(encoder.state_dict())
    for weight in (*other.visual.transformer[-1].parameters(), *other.visual.post_norm.parameters(), other.visual.head):
        weight.fill_(float("nan"))
    image = random(1, 3, 28, 28)
    assert torch.equal(other.encode(image), encoder.encode(image))
    other.visual.transformer[-2].mlp[0].weight.mul_(2)
    assert not torch.equal(other.encode(image), encoder.encode(image))


def test_images_of_a_batch_do_not_see_each_other(encoder: CLIPImageEncoder):
    images = random(3, 3, 30, 40)
    alone = torch.cat([encoder.encode(image[None]) for image in images])
    torch.testing.assert_close(encoder.encode(images), alone, rtol=1e-5, atol=1e-6)


def test_half_precision_weights_give_nearly_the_same(encoder: CLIPImageEncoder):
    half = CLIPImageEncoder(SMALL).requires_grad_(False)
    half.load_state_dict(encoder.state_dict())
    image = random(1, 3, 28, 28)
    got, want = half.to(torch.bfloat16).encode(image), encoder.encode(image)
    assert got.dtype == torch.bfloat16
    assert (got - want).abs().max() < 0.1 * want.abs().max()


def test_a_file_of_both_towers_loads(tmp_path: Path, encoder: CLIPImageEncoder):
    whole = {**encoder.state_dict(), "textual.head.0.weight": torch.zeros(2, 2), "log_scale": torch.zeros(1)}
    save_file(whole, tmp_path / "clip.safetensors")
    loaded = replace(SMALL, checkpoint_path=str(tmp_path / "clip.safetensors")).setup()
    image = random(1, 3, 28, 28)
    assert torch.equal(loaded.encode(image), encoder.encode(image))


@pytest.mark.parametrize("shape", [(3, 28, 28), (1, 4, 28, 28), (1, 3, 1, 28, 28)])
def test_what_is_no_batch_of_images_is_refused(encoder: CLIPImageEncoder, shape: tuple[int, ...]):
    with pytest.raises(ValueError, match=r"images are .*; expected \[B, 3, H, W\]"):
        encoder.encode(torch.zeros(shape))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_size": 30}, "image_size=30 must be a multiple of patch_size=14"),
        ({"num_heads": 5}, "dim=32 must be a multiple of num_heads=5"),
        ({"num_layers": 1}, "num_layers is 1"),
    ],
)
def test_a_config_out_of_range_says_so(change: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        replace(SMALL, **change).validate_tree()
