"""Sampling with two experts, each for its own noise levels: guidance, switch, and one solver history across it."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from cases.wan_network import network_config
from flashdreams.core.noise import GivenNoise
from flashdreams.infra.config import DiffusionModelConfig, ExpertConfig, PipelineConfig
from flashdreams.infra.scheduler.config import DPMPPSchedulerConfig, UniPCSchedulerConfig
from flashdreams.recipes.wan.config import WanTransformerConfig
from flashdreams.recipes.wan.transformer import WanConditions
from golden import Golden


def matches(golden: Golden) -> bool:
    return "guide_scale_low_high" in golden.config


def run(golden: Golden) -> Iterator[tuple[str, Tensor]]:
    config, inputs = golden.config, golden.inputs
    low, high = (
        WanTransformerConfig(network=network_config(config), dtype="float32", guidance_scale=scale, cfg="sequential",
                             len_t=inputs["noise"].shape[1])
        for scale in config["guide_scale_low_high"]
    )  # fmt: skip
    solver = {"unipc": UniPCSchedulerConfig, "dpm++": DPMPPSchedulerConfig}[config["solver"]]
    pipeline = PipelineConfig(
        name="a14b",
        height=inputs["noise"].shape[2],
        width=inputs["noise"].shape[3],
        diffusion_model=DiffusionModelConfig(
            transformer=low,
            high_noise=(ExpertConfig(sigma_low=config["boundary"], transformer=high),),
            scheduler=solver(num_steps=config["steps"], shift=config["shift"]),
        ),
    ).setup()
    model = pipeline.diffusion_model
    for expert, name in zip(model.experts, ("high_noise_model", "low_noise_model"), strict=True):
        expert.network.load_state_dict(golden.weights[name])
    conditions = WanConditions(inputs["context"][None], negative_text=inputs["context_null"][None])
    cache = pipeline.initialize_cache(conditions=conditions, noise=GivenNoise(inputs["noise"][None], {}))

    flows: list[Tensor] = []
    for expert in model.experts:
        expert.network.register_forward_hook(lambda *call: flows.append(call[-1][0]))
    yield "final_latent", pipeline.generate(0, cache)[0]
    assert len(flows) == len(config["calls"])
    yield "velocity_first_cond", flows[0]
    yield "velocity_first_uncond", flows[1]
    yield "velocity_last_cond", flows[-2]
