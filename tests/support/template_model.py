"""The template pipeline, with random weights that make its conditioner and its text matter."""

from __future__ import annotations

import torch

from flashdreams.config import derive_config
from flashdreams.infra.pipeline import StreamInferencePipeline
from flashdreams.recipes.template.config import PIPELINE_TEMPLATE


def template_pipeline(**transformer: object) -> StreamInferencePipeline:
    torch.manual_seed(7)
    config = derive_config(PIPELINE_TEMPLATE, diffusion_model={"transformer": transformer})
    pipeline = config.setup()
    torch.nn.init.normal_(pipeline.diffusion_model.transformer.network.brightness.weight, std=0.5)
    return pipeline


def lora(seed: int) -> dict[str, torch.Tensor]:
    """One for both of its blocks, of rank 4."""
    generator = torch.Generator().manual_seed(seed)
    return {
        f"transformer.blocks.{block}.attn1.to_v.lora_{side}.weight": torch.randn(shape, generator=generator)
        for block in (0, 1)
        for side, shape in (("A", (4, 48)), ("B", (48, 4)))
    }
