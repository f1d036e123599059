"""The DiT of Cosmos-Predict2.5 against diffusers' CosmosTransformer3DModel, and whole generations against its pipeline.

In :class:`float64.Float64`, without the float32 parts of diffusers, and with its epsilon for the norm of queries and
keys (1e-5; the original, and our default, has 1e-6). The noise levels are those of diffusers; there the network is told
them as they are, and ours, which tells whole timesteps as the original does, is made to do so here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cosmos_predict2._conditions import CosmosConditions
from cosmos_predict2._keymaps import dit_from_diffusers
from cosmos_predict2._network import CosmosNetwork
from cosmos_predict2._rope import rope_angles
from cosmos_predict2.config import CosmosTransformerConfig
from diffusers_cosmos import NETWORK, SHIFT, our_dit, their_dit, their_pipeline
from diffusers_wan import VAE21, vaes
from flashdreams.core.noise import GivenNoise
from flashdreams.core.rope import Rope
from flashdreams.infra.config import DiffusionModelConfig, PipelineConfig
from flashdreams.infra.pipeline import StreamInferencePipeline
from flashdreams.infra.scheduler import UniPCSchedulerConfig
from float64 import Float64, assert_same, assert_same_gradients, difference, randn

pytestmark = pytest.mark.ci_cpu

LIMIT = 1e-10
BATCH, FRAMES, ROWS, COLUMNS = 2, 4, 4, 6
LATENT = randn(BATCH, 4, FRAMES, ROWS, COLUMNS)
TEXT, NEGATIVE = randn(BATCH, 7, 12, seed=2), randn(BATCH, 9, 12, seed=3)

per_sample = torch.tensor([999.0, 417.0], dtype=torch.float64)
per_frame = torch.tensor([[0.1, 0.1, 803.0, 803.0], [0.1, 250.0, 250.0, 250.0]], dtype=torch.float64)


def given(count: int) -> Tensor:
    """The mask of ``count`` given frames."""
    mask = torch.zeros(BATCH, 1, FRAMES, ROWS, COLUMNS, dtype=torch.float64)
    mask[:, :, :count] = 1
    return mask


def padding() -> Tensor:
    """A mask in pixels whose right quarter is no picture."""
    mask = torch.zeros(1, 1, 8 * ROWS, 8 * COLUMNS, dtype=torch.float64)
    mask[..., 6 * COLUMNS :] = 1
    return mask


def run_ours(network: CosmosNetwork, timestep: Tensor, mask: Tensor) -> Tensor:
    config = network.config
    shape = FRAMES, ROWS // 2, COLUMNS // 2
    angles = rope_angles(shape, config.head_dim, config.rope_theta, config.rope_extrapolation)
    edge = padding()[:, :, None, ::8, ::8].expand(BATCH, -1, FRAMES, -1, -1)
    latent = torch.cat((LATENT, mask, edge), dim=1)
    return network(latent, timestep, Rope(angles.cos(), angles.sin()), network.encode_text(TEXT))


def run_theirs(dit: Any, timestep: Tensor, mask: Tensor) -> Tensor:
    """Their pipeline takes timesteps of 0 to 1, one per sample or ``[B, 1, T, 1, 1]``."""
    sigma = timestep / 1000
    sigma = sigma if sigma.ndim == 1 else sigma[:, None, :, None, None]
    return dit(LATENT, sigma, TEXT, condition_mask=mask, padding_mask=padding(), return_dict=False)[0]


@pytest.mark.parametrize(
    ("what", "timestep", "count"),
    [
        ("text to world", per_sample, 0),
        ("image to world", per_sample, 1),
        ("video to world, timestep per frame", per_frame, 2),
    ],
)
def test_flow_and_gradients(what: str, timestep: Tensor, count: int):
    with Float64():
        theirs = their_dit()
        want = run_theirs(theirs, timestep, given(count))
    ours = our_dit(theirs)
    got = run_ours(ours, timestep, given(count))
    assert_same(f"Cosmos DiT, {what}", got, want, LIMIT)
    assert_same_gradients(f"Cosmos DiT, {what}", got, want, ours, theirs, dit_from_diffusers)


def test_the_epsilon_of_queries_and_keys_is_what_the_original_and_diffusers_differ_in():
    theirs = their_dit()
    with Float64(), torch.no_grad():
        want = run_theirs(theirs, per_sample, given(0))
    ours = our_dit(theirs, replace(NETWORK, qk_eps=1e-6))
    assert 1e-7 < difference("Cosmos DiT, with the original's epsilon", run_ours(ours, per_sample, given(0)), want)


STEPS, GUIDANCE = 4, 7.0
NOISE = randn(1, 4, FRAMES, ROWS, COLUMNS, seed=5)
SIZE = ROWS * 8, COLUMNS * 8


def clip(frames: int) -> Tensor:
    """``frames`` pictures, uint8 ``[F, H, W, 3]``."""
    return torch.randint(0, 256, (frames, *SIZE, 3), generator=torch.Generator().manual_seed(4)).to(torch.uint8)


def latents_of_theirs(pipeline: Any, count: int, given_timestep: float | None) -> Tensor:
    request: dict[str, Any] = {}
    if count:
        pixels = clip(4 * count - 3).permute(3, 0, 1, 2)[None].double() / 127.5 - 1
        request = {"video": pixels, "num_latent_conditional_frames": count}
    return pipeline(
        prompt_embeds=TEXT[:1], negative_prompt_embeds=NEGATIVE[:1], latents=NOISE, height=SIZE[0], width=SIZE[1],
        num_frames=4 * FRAMES - 3, num_inference_steps=STEPS, guidance_scale=GUIDANCE, output_type="latent",
        conditional_frame_timestep=-1 if given_timestep is None else given_timestep / 1000, return_dict=False,
        **request,
    )[0]  # fmt: skip


def our_pipeline(theirs: Any, given_timestep: float | None) -> StreamInferencePipeline:
    pipeline = PipelineConfig(
        name="ours",
        diffusion_model=DiffusionModelConfig(
            transformer=CosmosTransformerConfig(
                network=NETWORK, dtype="float64", len_t=FRAMES, guidance_scale=1 + GUIDANCE, cfg="sequential",
                given_timestep=given_timestep,
            ),
            scheduler=UniPCSchedulerConfig(num_steps=STEPS, shift=SHIFT, table="diffusers"),
        ),
        decoder=VAE21,
        height=SIZE[0],
        width=SIZE[1],
    ).setup()  # fmt: skip
    pipeline.diffusion_model.transformer.network.load_state_dict(dit_from_diffusers(theirs.transformer.state_dict()))
    pipeline.decoder.load_state_dict(vaes(VAE21)[0].state_dict())
    scheduler = pipeline.diffusion_model.scheduler
    scheduler.steps = tuple(replace(step, timestep=1000 * step.sigma) for step in scheduler.steps)
    return pipeline


def latents_of_ours(pipeline: StreamInferencePipeline, count: int) -> Tensor:
    conditions, request = CosmosConditions(TEXT[:1], NEGATIVE[:1]), {}
    if count == 1:
        request = {"image": clip(1)[0]}
    elif count:
        pixels = clip(4 * count - 3).permute(3, 0, 1, 2)[None].float() / 127.5 - 1
        conditions = replace(conditions, image_latent=pipeline.encode_video(pixels))
    noise = GivenNoise(NOISE)
    return next(pipeline.rollout(conditions=conditions, noise=noise, num_frames=4 * FRAMES - 3, **request)).latent


@pytest.mark.parametrize(
    ("count", "given_timestep"), [(0, 0.1), (1, 0.1), (1, None), (2, 0.1)], ids=["text", "image", "plain", "video"]
)
@torch.no_grad()
def test_a_whole_generation(count: int, given_timestep: float | None):
    """Conditions, guidance and solver. Given frames are exact in ours; theirs end within the first level's distance
    of 1, times the noise."""
    with Float64():
        theirs = their_pipeline()
        want = latents_of_theirs(theirs, count, given_timestep)
    ours = our_pipeline(theirs, given_timestep)  # its noise levels are the published float32 ones, as theirs are
    with Float64():
        got = latents_of_ours(ours, count)
    what = f"Cosmos from {count} latent frames, timestep {given_timestep}, {STEPS} steps with guidance"
    assert_same(what, got[:, :, count:], want[:, :, count:], LIMIT)
    if count:
        assert_same(f"{what}: the given frames", got[:, :, :count], want[:, :, :count], 1e-5)


@torch.no_grad()
def test_the_timestep_that_is_told_for_given_frames_matters():
    with Float64():
        theirs = their_pipeline()
    results = []
    for given_timestep in (0.1, None):
        ours = our_pipeline(theirs, given_timestep)
        with Float64():
            results.append(latents_of_ours(ours, 1))
    assert (results[0] - results[1]).abs().max() > 1e-6
