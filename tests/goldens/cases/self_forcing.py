"""A whole Self-Forcing rollout: chunks over a rolling window, few-step sampling, commits, given first frames."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from cases.wan_network import network_config
from flashdreams.core.kv_cache import RollingKVCache
from flashdreams.core.noise import GivenNoise
from flashdreams.infra.cache import PipelineCache
from flashdreams.infra.config import DiffusionModelConfig, PipelineConfig
from flashdreams.infra.diffusion_model import DiffusionModel
from flashdreams.infra.pipeline import StreamInferencePipeline
from flashdreams.infra.scheduler import FewStepSchedulerConfig
from flashdreams.infra.scheduler.kernels import clean_estimate
from flashdreams.recipes.wan.config import WanTransformerConfig
from flashdreams.recipes.wan.transformer import WanConditions
from golden import Golden


def matches(golden: Golden) -> bool:
    return "Self-Forcing" in golden.repository and "pipeline/causal_inference.py" in golden.files


def run(golden: Golden) -> Iterator[tuple[str, Tensor]]:
    config, inputs = golden.config, golden.inputs
    pipeline: StreamInferencePipeline = pipeline_config(config).setup()
    model = pipeline.diffusion_model
    model.transformer.network.load_state_dict(golden.weights["model"])

    given = frames_second(inputs["initial_latent"]) if config["initial_frames"] else None
    filled = pipeline.config.plan(config["initial_frames"])
    first = next(i for i in range(100) if filled.frames_until(i) == config["initial_frames"])
    cache = pipeline.initialize_cache(
        conditions=WanConditions(text=inputs["prompt_embeds"]),
        noise=given_noise(golden, first),
        initial_latents=given,
    )
    for i in range(first + len(config["chunk_sizes"])):
        if i == first:
            yield from steps_of_chunk(model, i, cache)
        latent = pipeline.generate(i, cache)
        if i >= first:
            yield f"chunk{i - first}_latents", frames_second(latent)
        pipeline.finalize(i, cache)
        k, v = in_time_order(cache.experts[-1].branches[0].blocks[0].self_kv, cache.experts[-1].start)
        yield f"commit{i}_block0_k", k
        yield f"commit{i}_block0_v", v


def pipeline_config(config: dict[str, Any]) -> PipelineConfig:
    steps = config["denoising_steps"]
    return PipelineConfig(
        name="self-forcing",
        height=config["latent_height"],
        width=config["latent_width"],
        diffusion_model=DiffusionModelConfig(
            transformer=WanTransformerConfig(
                network=network_config(config),
                dtype="float32",
                len_t=config["frames_per_chunk"],
                first_len_t=1 if config["independent_first_frame"] else None,
                window_size_t=config["cache_capacity_frames"],
                sink_size_t=config["sink_frames"],
                context_noise=config["context_timestep"] / 1000,
            ),
            scheduler=FewStepSchedulerConfig(
                num_steps=len(steps),
                denoising_steps=tuple(steps),
                shift=config["shift"],
                warp=config["warped_timesteps"] != steps,
            ),
        ),
    )


def given_noise(golden: Golden, first: int) -> GivenNoise:
    """The recorded draws. Ours are numbered from the start of the clip, those of the file from the first new chunk."""
    frames = frames_second(golden.inputs["noise"])
    given = golden.config["initial_frames"]
    unused = torch.zeros(*frames.shape[:2], given, *frames.shape[3:])
    steps = {}
    for chunk, size in enumerate(golden.config["chunk_sizes"]):
        for step in range(len(golden.config["denoising_steps"]) - 1):
            flat = golden.inputs[f"renoise_chunk{chunk}_step{step}"]
            steps[first + chunk, step] = frames_second(flat.unflatten(0, (-1, size)))
    return GivenNoise(torch.cat((unused, frames), dim=2), steps)


def steps_of_chunk(model: DiffusionModel, i: int, cache: PipelineCache) -> Iterator[tuple[str, Tensor]]:
    """Flow and clean estimate of each denoising step; predicting changes no context, so ``generate`` can follow."""
    shape, (start, _) = cache.layout.shape(i), cache.layout.plan.span(i)
    x = cache.noise.initial(i, start, shape)
    for step in model.scheduler.steps:
        timestep = torch.full((shape[0],), step.timestep)
        flow = model.transformer.predict_flow(x, timestep, cache.experts[-1])
        yield f"chunk0_step{step.index}_flow", frames_second(flow)
        yield f"chunk0_step{step.index}_x0", frames_second(clean_estimate(x, flow, step.sigma))
        x = model.scheduler.transition(x, flow, step, lambda step=step: cache.noise.step(i, step.index, start, shape))


def in_time_order(cache: RollingKVCache, end: int) -> tuple[Tensor, Tensor]:
    """Keys and values of the frames visible after ``end`` frames, oldest first."""
    geometry = cache.geometry
    frames = [f for f in range(end) if f < geometry.sink or f >= end - geometry.ring]
    slots = torch.cat([geometry.token_slots(frame, frame + 1) for frame in frames])
    return cache.k[:, slots], cache.v[:, slots]


def frames_second(latent: Tensor) -> Tensor:
    """``[B, C, T, H, W]`` <-> ``[B, T, C, H, W]``, which the originals use."""
    return latent.transpose(1, 2)
