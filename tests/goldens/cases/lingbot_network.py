"""One forward pass of the LingBot-World DiT, and the causal-fast rollout over a rolling window with a sink."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from cases.lingbot_camera import controls, encoded
from cases.self_forcing import in_time_order
from flashdreams.core.noise import GivenNoise
from flashdreams.core.rope import rope_3d
from flashdreams.infra.cache import PipelineCache
from flashdreams.infra.config import DiffusionModelConfig, PipelineConfig
from flashdreams.infra.diffusion_model import DiffusionModel
from flashdreams.infra.pipeline import StreamInferencePipeline
from flashdreams.infra.scheduler import IndexedFewStepSchedulerConfig
from flashdreams.recipes.wan.conditions import WanConditions
from flashdreams.recipes.wan.config import WanTransformerConfig
from flashdreams.recipes.wan.network import ChunkContext, NetworkCache
from golden import Golden
from lingbot.config import CameraEncoderConfig, LingBotNetworkConfig


def forward(golden: Golden) -> Iterator[tuple[str, Tensor]]:
    """With what a camera adds made once for all blocks, and block by block."""
    inputs, control = golden.inputs, golden.inputs.get("plucker")
    if "c2ws" in inputs:
        for name, control in encoded(golden, golden.config["frames"]):
            yield name, control
    for keep in (True, False):
        network = network_config(golden.config, keep_injections=keep).setup()
        network.load_state_dict(golden.weights["model"])
        x = torch.cat((inputs["x"], inputs["y"]), dim=1)
        frames, rows, columns = x.shape[2], x.shape[3] // 2, x.shape[4] // 2
        context = ChunkContext(rope_3d(range(frames), rows, columns, network.config.head_dim))
        text = NetworkCache(network.encode_text(inputs["context_0"][None]))
        yield "velocity", network(x, inputs["t"], context, text, network.prepare(control))


def network_config(published: dict[str, Any], **ours: Any) -> LingBotNetworkConfig:
    """Our config with the values of a published ``config.json``."""
    known = {field.name for field in fields(LingBotNetworkConfig)} & published.keys()
    values = {k: tuple(v) if isinstance(v := published[k], list) else v for k in known}
    return LingBotNetworkConfig(**values, **ours)


def rollout(golden: Golden) -> Iterator[tuple[str, Tensor]]:
    """From poses to clean latents, chunk by chunk."""
    config = golden.config
    pipeline: StreamInferencePipeline = pipeline_config(config).setup()
    model, frames = pipeline.diffusion_model, 4 * config["latent_frames"] - 3
    model.transformer.network.load_state_dict(golden.weights["model"])
    rows = [controls(golden, frames, 4 * config["chunk_size"])]
    cache = pipeline.initialize_cache(conditions=conditions(golden), noise=given_noise(golden))
    for i in range(config["latent_frames"] // config["chunk_size"]):
        start, stop = cache.layout.plan.span(i)
        chunk = [row[max(0, 4 * start - 3) : 4 * stop - 3] for row in rows]
        input = pipeline.encode_controls(chunk, i, cache)
        if i == 0:
            yield from flows_of_chunk(model, cache, input)
        yield f"chunk{i}_latents", pipeline.generate(i, cache, input)[0]
        pipeline.finalize(i, cache)
        k, v = in_time_order(cache.experts[0].branches[0].blocks[0].self_kv, cache.experts[0].start)
        yield f"commit{i}_block0_k", k
        yield f"commit{i}_block0_v", v


def pipeline_config(config: dict[str, Any]) -> PipelineConfig:
    unlimited = config["local_attn_size"] == -1
    return PipelineConfig(
        name="causal-fast",
        height=config["height"] // 8,
        width=config["width"] // 8,
        encoder=CameraEncoderConfig(),
        diffusion_model=DiffusionModelConfig(
            transformer=WanTransformerConfig(
                network=network_config(config),
                dtype="float32",
                len_t=config["chunk_size"],
                window_size_t=config["latent_frames"] if unlimited else config["local_attn_size"],
                sink_size_t=config["sink_size"],
                concat_image_mask_to_latent=True,
            ),
            scheduler=IndexedFewStepSchedulerConfig(
                num_steps=len(config["timesteps_index"]),
                indices=tuple(config["timesteps_index"]),
                shift=config["sample_shift"],
            ),
        ),
    )


def conditions(golden: Golden) -> WanConditions:
    """The prompt, and the clip of the picture, whose first latent frame is given."""
    latent = golden.inputs["image_latents"][None]
    mask = torch.zeros(1, 4, *latent.shape[2:])
    mask[:, :, 0] = 1
    return WanConditions(text=golden.inputs["context"][None], image_latent=latent, image_mask=mask)


def given_noise(golden: Golden) -> GivenNoise:
    """The recorded draws, all of one generator: the whole clip, then one per chunk and step but the last."""
    config = golden.config
    steps = {
        (chunk, step): golden.inputs[f"renoise_chunk{chunk}_step{step}"][None]
        for chunk in range(config["latent_frames"] // config["chunk_size"])
        for step in range(len(config["timesteps_index"]) - 1)
    }
    return GivenNoise(golden.inputs["noise"][None], steps)


def flows_of_chunk(model: DiffusionModel, cache: PipelineCache, input: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Flow of each step of chunk 0; predicting changes no context, so ``generate`` can follow."""
    shape = cache.layout.shape(0)
    x = cache.noise.initial(0, 0, shape)
    for step in model.scheduler.steps:
        flow = model.transformer.predict_flow(x, torch.tensor([step.timestep]), cache.experts[0], input)
        yield f"chunk0_step{step.index}_flow", flow[0]
        x = model.scheduler.transition(x, flow, step, lambda step=step: cache.noise.step(0, step.index, 0, shape))
