"""How each file of FlashVSR is run; see :mod:`cases.flashvsr`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from flashdreams.core.noise import GivenNoise
from flashdreams.infra.config import DiffusionModelConfig, PipelineConfig
from flashdreams.infra.pipeline import StreamInferencePipeline
from flashdreams.infra.scheduler import FewStepSchedulerConfig
from flashdreams.recipes.wan.conditions import WanConditions
from flashvsr._attention import PIXELS_PER_TOKEN, REFERENCE_AREA, neighbours, select_windows
from flashvsr._colour import adain, wavelet
from flashvsr._decoder import TCDecoder
from flashvsr._encoder import LowQuality
from flashvsr._projection import SLICE, LowQualityProjection, ProjectionCache
from flashvsr.config import FlashVSRNetworkConfig, FlashVSRTransformerConfig, LowQualityEncoderConfig, TCDecoderConfig
from golden import Golden

Results = Iterator[tuple[str, Tensor]]


def projection(golden: Golden) -> Results:
    """Slice by slice as the original streams, and all slices of a chunk at once as ours does."""
    config, video = golden.config, golden.inputs["video"]
    module = LowQualityProjection(
        LowQualityEncoderConfig(
            hidden_dims=(config["hidden1"], config["hidden2"]),
            dim=config["out_dim"],
            carries_past=config["version"] == "1.1",
        )
    )
    module.load_state_dict(golden.weights["model"])
    for length in (SLICE, video.shape[2] - 1):
        cache = ProjectionCache()
        module.begin(video[:, :, :1], cache)
        tokens = [module(piece, cache) for piece in video[:, :, 1:].split(length, dim=2)]
        yield "stream_layer0", torch.cat(tokens, dim=1).flatten(1, 2)


def selection(golden: Golden) -> Results:
    config = golden.config
    grid, heads = (config["block_rows"], config["block_cols"]), config["heads"]
    q, k = (golden.inputs[f"{name}_windows"].flatten(0, 1)[None].unflatten(-1, (heads, -1)) for name in "qk")
    tokens = config["tokens_per_window_stored"]
    chosen = select_windows(q, k, grid, tokens, config["topk"], config["local_range"])
    yield "block_mask", chosen.to(torch.uint8)
    yield "local_mask_sliding", neighbours(grid, config["local_range"]).to(torch.uint8)
    yield "local_mask_clamped", _moved_inwards(grid, config["local_range"]).to(torch.uint8)


def _moved_inwards(grid: tuple[int, int], local_range: int) -> Tensor:
    """The original's other mask, of whole clips, which a stream does not use: at the border the square of the nearest
    window that has a whole one."""
    rows, columns = grid
    squares = neighbours(grid, local_range).unflatten(0, grid)
    low, high = local_range // 2, local_range - 1 - local_range // 2
    inside = [[min(max(i, low), max(side - 1 - high, low)) for i in range(side)] for side in (rows, columns)]
    return squares[inside[0]][:, inside[1]].flatten(0, 1)


def streamed_network(golden: Golden) -> Results:
    """Three calls with rows kept between them, by the diffusion model that serves it."""
    pipeline: StreamInferencePipeline = pipeline_config(golden.config).setup()
    pipeline.diffusion_model.transformer.network.load_state_dict(golden.weights["model"])
    cache = pipeline.initialize_cache(
        conditions=WanConditions(golden.inputs["context"]), noise=GivenNoise(golden.inputs["noise"], {})
    )
    frames = torch.zeros(1, 3, 0, 0, 0, dtype=torch.uint8)
    for i in range(golden.config["chunks"]):
        tokens = golden.inputs[f"lq_tokens_{i}"]
        input = LowQuality(tokens.unflatten(1, (6 if i == 0 else 2, -1)), frames)
        yield f"x0_chunk{i}", pipeline.generate(i, cache, input)
        pipeline.finalize(i, cache)


def pipeline_config(config: dict[str, Any]) -> PipelineConfig:
    names = ("dim", "ffn_dim", "in_dim", "out_dim", "text_dim", "freq_dim")
    area = config["latent_height"] * config["latent_width"] * PIXELS_PER_TOKEN // 4
    network = FlashVSRNetworkConfig(
        **{name: config[name] for name in names},
        num_heads=config["heads"],
        num_layers=config["layers"],
        text_len=7,
        window=tuple(config["window"]),
        local_range=config["local_range"],
        sparse_ratio=config["topk_ratio"] * area / REFERENCE_AREA,
    )
    return PipelineConfig(
        name="flashvsr",
        height=config["latent_height"],
        width=config["latent_width"],
        diffusion_model=DiffusionModelConfig(
            transformer=FlashVSRTransformerConfig(
                network=network, dtype="float32", window_size_t=2 * (math.floor(config["kv_ratio"]) + 1)
            ),
            scheduler=FewStepSchedulerConfig(num_steps=1, denoising_steps=(config["timestep"],), warp=False),
        ),
    )


def tiny_decoder(golden: Golden) -> Results:
    """All latents at once, several together, and streamed; the file has frames second and values in [0, 1]."""
    latents = golden.inputs["latents"].transpose(1, 2)
    for together in (1, 2):
        config = TCDecoderConfig(dtype="float32", dims=tuple(golden.config["channels"]), latents_per_pass=together)
        decoder: TCDecoder = config.setup()
        decoder.load_state_dict(golden.weights["model"])
        lengths = (latents.shape[2],) if together == 2 else (1, 2)
        cache, start, decoded = decoder.initialize_cache(), 0, []
        for length in lengths:
            frames = [config.frames(0, stop) for stop in (start, start + length)]
            low = golden.inputs["lq"][:, :, frames[0] : frames[1]]
            decoded.append(decoder.decode_uncoloured(latents[:, :, start : start + length], low, cache))
            start += length
        yield "decoded", (torch.cat(decoded, dim=2).transpose(1, 2) + 1) / 2


def colour(golden: Golden) -> Results:
    video, reference = golden.inputs["hq"], golden.inputs["lq"]
    yield "adain", adain(video, reference)
    size = golden.config["chunk"]
    parts = zip(video.split(size, dim=2), reference.split(size, dim=2), strict=True)
    yield "adain_chunked", torch.cat([adain(*part) for part in parts], dim=2)
    yield "wavelet", wavelet(video, reference)
