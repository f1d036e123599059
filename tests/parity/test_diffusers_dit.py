"""The Wan DiT against diffusers' WanTransformer3DModel, with its weights brought across by the key map.

The maths is the same. The precision is not: diffusers has rotary tables, sinusoids of the timestep, layer norms and
modulation in float32 in any model, where the native original (and ours) has rotary angles and sinusoids in float64. So
it runs in :class:`float64.Float64`; :func:`test_as_it_stands_diffusers_differs_by_float32` says what it does without.
Its bfloat16 results are not compared: it rounds the residual stream after each addition and the time embedding before
its projection, the original does not. For those, see the goldens ``wan21_*`` and ``wan22_*``.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from diffusers_wan import A14B_I2V, FLF2V, I2V, T2V, our_dit, their_dit
from flashdreams.core.rope import rope_3d
from flashdreams.recipes.wan.config import WanNetworkConfig
from flashdreams.recipes.wan.keymaps import dit_from_diffusers
from flashdreams.recipes.wan.network import ChunkContext, NetworkCache, WanNetwork
from float64 import Float64, assert_same, assert_same_gradients, difference, randn

pytestmark = pytest.mark.ci_cpu

MODELS = {"T2V": T2V, "I2V with CLIP": I2V, "FLF2V": FLF2V, "I2V of A14B": A14B_I2V}
FRAMES, ROWS, COLUMNS = 3, 2, 3
TOKENS = FRAMES * ROWS * COLUMNS
TEXT = randn(2, 7, 12, seed=2)

per_sample = torch.tensor([999.0, 417.0])
per_token = torch.cat((torch.zeros(2, ROWS * COLUMNS), per_sample[:, None].expand(2, TOKENS - ROWS * COLUMNS)), dim=1)
"""Wan2.2 TI2V with a given first frame, whose tokens are clean."""
per_frame = per_token[:, :: ROWS * COLUMNS]


def latent(config: WanNetworkConfig) -> Tensor:
    return randn(2, config.in_dim, FRAMES, 2 * ROWS, 2 * COLUMNS)


def image_tokens(config: WanNetworkConfig) -> Tensor | None:
    return None if config.image_dim is None else randn(2, config.image_tokens, config.image_dim, seed=3)


def run_ours(network: WanNetwork, timestep: Tensor) -> Tensor:
    config = network.config
    rope = rope_3d(range(FRAMES), ROWS, COLUMNS, config.head_dim, dtype=torch.float64)
    cache = NetworkCache(network.encode_text(TEXT, image_tokens(config)))
    return network(latent(config), timestep, ChunkContext(rope), cache)


def run_theirs(dit, config: WanNetworkConfig, timestep: Tensor) -> Tensor:
    image = image_tokens(config)
    if image is not None and config.image_positions:
        image = image.reshape(4, -1, image.shape[2])  # it takes each image of a pair by itself
    text = F.pad(TEXT, (0, 0, 0, 512 - TEXT.shape[1]))
    return dit(latent(config), timestep, text, image, return_dict=False)[0]


@pytest.mark.parametrize("name", MODELS)
def test_flow_and_gradients(name: str):
    config = MODELS[name]
    with Float64():
        theirs = their_dit(config)
        want = run_theirs(theirs, config, per_sample)
    ours = our_dit(config, theirs)
    got = run_ours(ours, per_sample)
    assert_same(f"DiT {name}", got, want)
    assert_same_gradients(f"DiT {name}", got, want, ours, theirs, dit_from_diffusers)


def test_a_timestep_for_every_token():
    """Per frame as well: ours takes what TI2V needs without saying it for each token."""
    with Float64(), torch.no_grad():
        theirs = their_dit(T2V)
        want = run_theirs(theirs, T2V, per_token)
    ours = our_dit(T2V, theirs)
    assert_same("DiT TI2V, timestep per token", run_ours(ours, per_token).detach(), want)
    assert_same("DiT TI2V, timestep per frame", run_ours(ours, per_frame).detach(), want)
    assert (run_ours(ours, per_sample) - want).abs().max() > 1e-3, "the first frame's timestep matters"


def test_as_it_stands_diffusers_differs_by_float32():
    theirs = their_dit(T2V)
    with torch.no_grad():
        want = run_theirs(theirs, T2V, per_sample)
        got = run_ours(our_dit(T2V, theirs), per_sample)
    assert 1e-8 < difference("DiT T2V, diffusers with its float32 parts", got, want) < 1e-4
