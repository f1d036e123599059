"""Inputs that say nothing, of the sizes that a model takes: for plans, and to compile with."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from flashdreams.core.controls import Control, Frame, Intrinsics, Pose
from flashdreams.infra.config import PipelineConfig
from flashdreams.infra.layout import Layout
from flashdreams.infra.pipeline import StreamInferencePipeline

_IDENTITY = ((1.0, 0.0, 0.0, 0.0), (0.0, 1.0, 0.0, 0.0), (0.0, 0.0, 1.0, 0.0), (0.0, 0.0, 0.0, 1.0))


def blank_layout(pipeline: StreamInferencePipeline, height: int, width: int, num_frames: int | None = None) -> Layout:
    """Of one sample from text; ``num_frames``: the length of a model that makes one chunk."""
    config, compression = pipeline.config, pipeline.decoder.spatial_compression if pipeline.decoder else 1
    plan = config.plan(latent_frames=None if num_frames is None else config.latent_frames(num_frames))
    channels = pipeline.diffusion_model.transformer.latent_channels
    return Layout(1, channels, height // compression, width // compression, plan)


def blank_conditions(config: PipelineConfig, layout: Layout, device: torch.device | str) -> dict[str, Tensor]:
    """Conditions of one sample, zeros, an image included where the model needs one."""
    model, transformer = config.diffusion_model, config.diffusion_model.transformer
    make = lambda *shape: torch.zeros(1, *shape, device=device)  # noqa: E731
    slots = {}
    if transformer.takes_text:
        length, width = transformer.text_shape
        slots["text"] = make(length or 512, width or 1)
        if model.negative_prompt(None) is not None:
            slots["negative_text"] = make(length or 512, width or 1)
    if config.image_use == "concat":
        frames = layout.plan.first_len_t if transformer.bidirectional else 2
        step = config.decoder.temporal_compression if config.decoder else 1
        slots["image_latent"] = make(layout.channels, frames, layout.height, layout.width)
        slots["image_mask"] = make(step, frames, layout.height, layout.width)
    network: Any = transformer.network
    if getattr(network, "image_dim", None) is not None:
        slots["image_embed"] = make(network.image_tokens, network.image_dim)
    return slots


def blank_control(config: PipelineConfig, layout: Layout) -> Control | None:
    """A control of each kind that the model needs to be told all the time."""
    if config.encoder is None:
        return None
    spec, scale = config.encoder.takes, getattr(config.encoder, "scale", 1)
    compression = config.decoder.spatial_compression if config.decoder else 1
    height, width = (size * compression // scale for size in (layout.height, layout.width))
    pose = None
    if spec.pose:
        pose = Pose(_IDENTITY, Intrinsics(width, width, width / 2, height / 2, width, height))
    frame = Frame(np.zeros((height, width, 3), np.uint8)) if spec.frame else None
    return Control(pose=pose, frame=frame) if pose or frame else None
