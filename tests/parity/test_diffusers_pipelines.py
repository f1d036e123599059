"""Whole generations against diffusers' WanPipeline and WanImageToVideoPipeline: conditions, guidance, solver, VAE.

Both sides run as a user runs them, from embeddings, images and the same noise to a video, in
:class:`float64.Float64`: diffusers then rounds none of its parts to float32, and ours hands the latents of given images
on as they are. The noise levels are those of diffusers, rounded to float32 on both sides (Wan's own table differs by
construction). Tokens of images are given: the image processor of diffusers crops where the original squeezes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers import UniPCMultistepScheduler, WanImageToVideoPipeline, WanPipeline
from torch import Tensor

from diffusers_wan import A14B_I2V, FLF2V, I2V, T2V, VAE21, VAE22, their_dit, vaes
from flashdreams.core.noise import GivenNoise
from flashdreams.infra.config import DiffusionModelConfig, ExpertConfig, PipelineConfig
from flashdreams.infra.pipeline import StreamInferencePipeline
from flashdreams.infra.scheduler import UniPCSchedulerConfig
from flashdreams.recipes.wan.conditions import WanConditions
from flashdreams.recipes.wan.config import WanNetworkConfig, WanTransformerConfig
from flashdreams.recipes.wan.keymaps import dit_from_diffusers
from flashdreams.recipes.wan.vae_config import WanVAEConfig
from float64 import LIMIT, Float64, assert_same, randn

pytestmark = pytest.mark.ci_cpu

BATCH, FRAMES, ROWS, COLUMNS, STEPS, SHIFT = 2, 3, 2, 4, 4, 5.0
GUIDANCE_HIGH, GUIDANCE_LOW = 4.0, 3.0
NOISE = randn(BATCH, 4, FRAMES, ROWS, COLUMNS)
TEXT, NEGATIVE = randn(BATCH, 7, 12, seed=2), randn(BATCH, 9, 12, seed=3)


@dataclass(frozen=True)
class Case:
    network: WanNetworkConfig
    codec: WanVAEConfig = VAE21
    boundary: float | None = None
    """Noise level at which two experts meet."""
    images: int = 0
    first_frame_stands: bool = False
    """Wan2.2 TI2V: the given frame is part of the sample, at timestep 0 (``expand_timesteps``)."""

    @property
    def size(self) -> tuple[int, int]:
        return ROWS * self.codec.spatial_compression, COLUMNS * self.codec.spatial_compression


CASES = {
    "Wan2.1 T2V": Case(T2V),
    "Wan2.1 I2V": Case(I2V, images=1),
    "Wan2.1 FLF2V": Case(FLF2V, images=2),
    "Wan2.2 T2V-A14B": Case(T2V, boundary=0.875),
    "Wan2.2 I2V-A14B": Case(A14B_I2V, boundary=0.9, images=1),
    "Wan2.2 TI2V from text": Case(T2V, codec=VAE22, first_frame_stands=True),
    "Wan2.2 TI2V from an image": Case(T2V, codec=VAE22, images=1, first_frame_stands=True),
}


class UniPC(UniPCMultistepScheduler):
    """Coefficients from the float32 table, in float64."""

    def set_timesteps(self, *args: Any, **options: Any) -> None:
        super().set_timesteps(*args, **options)
        self.sigmas = self.sigmas.double()


def images(case: Case) -> list[Tensor]:
    """Of the size of the video, uint8 ``[H, W, 3]``."""
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(0, 256, (*case.size, 3), generator=generator).to(torch.uint8) for _ in range(case.images)]


def image_tokens(case: Case) -> Tensor | None:
    network = case.network
    return None if network.image_dim is None else randn(1, network.image_tokens, network.image_dim, seed=5)


def their_pipeline(case: Case) -> Any:
    kind = WanImageToVideoPipeline if case.images else WanPipeline
    both = case.boundary is not None
    pipeline = kind(
        tokenizer=None,
        text_encoder=None,
        vae=vaes(case.codec)[1],
        scheduler=UniPC(flow_shift=SHIFT, prediction_type="flow_prediction", use_flow_sigmas=True),
        transformer=their_dit(case.network, seed=0),
        transformer_2=their_dit(case.network, seed=1) if both else None,
        boundary_ratio=case.boundary,
        expand_timesteps=case.first_frame_stands,
    )
    pipeline.set_progress_bar_config(disable=True)
    tokens = image_tokens(case)
    if tokens is not None:
        pipeline.encode_image = lambda *_: tokens.reshape(case.images, -1, tokens.shape[2])
    return pipeline


def run_theirs(pipeline: Any, case: Case) -> tuple[Tensor, Tensor]:
    """Latent and video, ``[B, T, 3, H, W]`` in [0, 1]."""
    given = [image.double().permute(2, 0, 1)[None] / 255 for image in images(case)]
    request = dict(zip(("image", "last_image"), given, strict=False))
    text, negative = (F.pad(x, (0, 0, 0, 512 - x.shape[1])) for x in (TEXT, NEGATIVE))
    height, width = case.size
    decode, decoded = pipeline.vae.decode, []
    pipeline.vae.decode = lambda raw, **options: decoded.append(raw) or decode(raw, **options)
    video = pipeline(
        prompt_embeds=text, negative_prompt_embeds=negative, latents=NOISE, height=height, width=width,
        num_frames=4 * FRAMES - 3, num_inference_steps=STEPS, guidance_scale=GUIDANCE_HIGH,
        guidance_scale_2=GUIDANCE_LOW if case.boundary else None, output_type="pt", return_dict=False, **request,
    )[0]  # fmt: skip
    mean, std = torch.tensor([case.codec.latents_mean, case.codec.latents_std])[..., None, None, None]
    return (decoded[0] - mean) / std, video


def our_pipeline(case: Case, theirs: Any) -> StreamInferencePipeline:
    high = WanTransformerConfig(
        network=case.network, dtype="float64", len_t=FRAMES, guidance_scale=GUIDANCE_HIGH, cfg="sequential",
        stamp_image_latent=case.first_frame_stands, takes_last_image=case.images == 2,
        concat_image_mask_to_latent=case.images > 0 and not case.first_frame_stands,
    )  # fmt: skip
    both = case.boundary is not None
    pipeline = PipelineConfig(
        name="ours",
        diffusion_model=DiffusionModelConfig(
            transformer=replace(high, guidance_scale=GUIDANCE_LOW) if both else high,
            high_noise=(ExpertConfig(sigma_low=case.boundary, transformer=high),) if both else (),
            scheduler=UniPCSchedulerConfig(num_steps=STEPS, shift=SHIFT, table="diffusers"),
        ),
        decoder=case.codec,
        height=case.size[0],
        width=case.size[1],
    ).setup()
    for expert, dit in zip(pipeline.diffusion_model.experts, (theirs.transformer, theirs.transformer_2), strict=False):
        expert.network.load_state_dict(dit_from_diffusers(dit.state_dict()))
    pipeline.decoder.load_state_dict(vaes(case.codec)[0].state_dict())
    return pipeline


def run_ours(pipeline: StreamInferencePipeline, case: Case) -> tuple[Tensor, Tensor]:
    """Latent and video, as :func:`run_theirs`."""
    tokens = image_tokens(case)
    conditions = WanConditions(TEXT, NEGATIVE, image_embed=None if tokens is None else tokens.expand(BATCH, -1, -1))
    request = dict(zip(("image", "last_image"), images(case), strict=False))
    rollout = pipeline.rollout(conditions=conditions, noise=GivenNoise(NOISE), num_frames=4 * FRAMES - 3, **request)
    latent = next(rollout).latent
    video = pipeline.decoder.decode(latent, pipeline.decoder.initialize_cache())
    return latent, (video.transpose(1, 2) + 1) / 2


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_latent_and_video(name: str):
    case = CASES[name]
    with Float64():
        theirs = their_pipeline(case)
        want_latent, want_video = run_theirs(theirs, case)
    ours = our_pipeline(case, theirs)  # its noise levels are the published float32 ones, as theirs are
    with Float64():
        latent, video = run_ours(ours, case)
        assert_same(f"{name}, {STEPS} steps with guidance: latent", latent, want_latent)
        assert_same(f"{name}, {STEPS} steps with guidance: video", video, want_video)


@torch.no_grad()
def test_one_changed_weight_of_either_expert_is_noticed():
    case = CASES["Wan2.2 T2V-A14B"]
    with Float64():
        ours = our_pipeline(case, their_pipeline(case))
        before, _ = run_ours(ours, case)
        for expert in ours.diffusion_model.experts:
            weight = expert.network.blocks[0].self_attn.k.weight
            weight[0, 0] += 1e-3
            after, _ = run_ours(ours, case)
            weight[0, 0] -= 1e-3
            assert (after - before).abs().max() > LIMIT
