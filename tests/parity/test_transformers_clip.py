"""The CLIP vision tower against transformers' CLIPVisionModel.

The maths is the same and wholly in the model's dtype. By construction different: transformers' image processor crops
where the original (and ours) squeezes, so that both get the same pixels here; what comes before is compared with the
original in the golden ``clip_vision`` and its preprocessing.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from flashdreams.core.checkpoint.keymap import KeyMap, Reshape
from flashdreams.recipes.wan.clip import CLIPImageEncoder
from flashdreams.recipes.wan.clip_config import CLIPVisionConfig
from flashdreams.recipes.wan.keymaps import CLIP_FROM_TRANSFORMERS, clip_from_transformers
from float64 import Float64, assert_same, assert_same_gradients, randn, randomize

pytestmark = pytest.mark.ci_cpu

WIDE = CLIPVisionConfig(num_layers=2, mlp_ratio=1, out_dim=8)
"""The widths of ViT-H/14, which the published key map names, with two thin layers."""
SMALL = CLIPVisionConfig(image_size=28, patch_size=14, dim=32, mlp_ratio=2, out_dim=16, num_heads=4, num_layers=3)


def build(kind: type[Any], config: CLIPVisionConfig) -> Any:
    return kind(
        transformers.CLIPVisionConfig(
            hidden_size=config.dim, intermediate_size=config.mlp_ratio * config.dim, projection_dim=config.out_dim,
            num_hidden_layers=config.num_layers, num_attention_heads=config.num_heads, image_size=config.image_size,
            patch_size=config.patch_size, hidden_act="gelu", layer_norm_eps=config.norm_eps,
        )
    ).eval()  # fmt: skip


@torch.no_grad()
def test_tokens_at_the_published_widths():
    """The tokens that the DiT gets are those after the last block but one, here the first."""
    with Float64():
        theirs = build(transformers.CLIPVisionModelWithProjection, WIDE)
    randomize(theirs)
    ours = CLIPImageEncoder(WIDE).double()
    ours.load_state_dict(clip_from_transformers(dict(theirs.state_dict())))
    pixels = randn(1, 3, 224, 224)
    want = theirs(pixel_values=pixels, output_hidden_states=True).hidden_states
    assert_same("CLIP ViT-H/14 tokens, last block but one", ours.visual(pixels, 1), want[-2])


def test_tokens_after_each_block_and_gradients():
    with Float64():
        theirs = build(transformers.CLIPVisionModelWithProjection, SMALL)
    randomize(theirs)
    ours = CLIPImageEncoder(SMALL).double()
    any_width = KeyMap(tuple(step for step in CLIP_FROM_TRANSFORMERS.steps if not isinstance(step, Reshape)))

    def rename(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        shapes = ours.state_dict()
        return {name: value.view_as(shapes[name]) for name, value in any_width.apply(state).items()}

    ours.load_state_dict(rename(dict(theirs.state_dict())))
    pixels = randn(2, 3, 28, 28)
    want = theirs(pixel_values=pixels, output_hidden_states=True).hidden_states
    for blocks in range(3):
        assert_same(f"CLIP tokens after {blocks} of 3 blocks", ours.visual(pixels, blocks), want[blocks])
    got = ours.visual(pixels, 3)
    assert_same("CLIP tokens after 3 of 3 blocks", got, want[3])
    unused = ("visual.head", "visual.post_norm.weight", "visual.post_norm.bias")
    assert_same_gradients("CLIP", got, want[3], ours, theirs, rename, unused)


def test_a_file_without_the_projection():
    """The keys of ``CLIPVisionModel``, which transformers 5 names otherwise."""
    with torch.device("meta"):
        theirs, ours = build(transformers.CLIPVisionModel, WIDE), CLIPImageEncoder(WIDE)
    state = clip_from_transformers(dict(theirs.state_dict()))
    expected = {name: weight.shape for name, weight in ours.state_dict().items()}
    del expected["visual.head"]
    assert {name: weight.shape for name, weight in state.items()} == expected
