"""Configs of Wan models from the sizes that ``flashdreams bench`` is given (no torch, but for the inputs' sizes)."""

from __future__ import annotations

import argparse
from typing import Any

from flashdreams.infra.config import DecoderConfig, DiffusionModelConfig, PipelineConfig
from flashdreams.infra.errors import UserError
from flashdreams.infra.scheduler.config import FewStepSchedulerConfig
from flashdreams.plugins.registry import get_runner
from flashdreams.recipes.wan.config import WanNetworkConfig, WanTransformerConfig
from flashdreams.recipes.wan.vae_config import WanVAEConfig

_WEIGHTS = "flashdreams.acceleration.bench.weights:"


def step_config(options: argparse.Namespace) -> tuple[WanTransformerConfig, int]:
    """A network whose window is full, and the tokens of one of its latent frames."""
    frames = options.frames_per_chunk
    tokens, rest = divmod(options.queries, max(1, frames))
    if frames < 1 or rest or tokens < 1:
        raise UserError(f"--queries {options.queries} is no whole number of tokens in each of {frames} latent frames")
    window, rest = divmod(options.keys, tokens)
    if rest or window < frames:
        raise UserError(
            f"--keys {options.keys} must be at least --queries, and a multiple of the {tokens} tokens of a latent frame"
        )
    network = _network(options)
    config = WanTransformerConfig(
        network=network,
        dtype=options.dtype,
        len_t=frames,
        window_size_t=window,
        checkpoint_path=f"random:{options.seed}",
    )
    return config, tokens


def rollout_config(options: argparse.Namespace) -> PipelineConfig:
    """A pipeline of the sizes given, with the weights given or random ones."""
    if options.latent_h % 2 or options.latent_w % 2:
        raise UserError(f"the latent is {options.latent_h}x{options.latent_w}; this network takes even numbers")
    weights = f"random:{options.seed}" if options.weights is None else str(options.weights)
    transform = lambda part: None if options.weights is None else _WEIGHTS + part  # noqa: E731
    transformer = WanTransformerConfig(
        network=_network(options, text_dim=options.text_dim, freq_dim=options.freq_dim),
        dtype=options.dtype, len_t=options.frames_per_chunk, window_size_t=options.window, sink_size_t=options.sink,
        checkpoint_path=weights, state_dict_transform=transform("dit"),
    )  # fmt: skip
    levels = tuple(round(1000 * (options.steps - i) / options.steps) for i in range(options.steps))
    scheduler = FewStepSchedulerConfig(num_steps=options.steps, denoising_steps=levels, shift=options.shift)
    decoder = None if options.no_decode else WanVAEConfig(
        dim=options.vae_dim, dtype=options.dtype, checkpoint_path=weights, state_dict_transform=transform("vae"),
    )  # fmt: skip
    scale = decoder.spatial_compression if decoder else 1
    return PipelineConfig(
        name="bench",
        diffusion_model=DiffusionModelConfig(transformer=transformer, scheduler=scheduler),
        decoder=decoder,
        height=scale * options.latent_h,
        width=scale * options.latent_w,
    )


def rollout_sizes(options: argparse.Namespace) -> Any:
    """Shapes of what such a rollout is given."""
    from flashdreams.acceleration.bench.inputs import Sizes

    network = _network(options)
    chunk = 1, network.in_dim, options.frames_per_chunk, options.latent_h, options.latent_w
    return Sizes(chunk, options.chunks, options.steps, options.text_dim, network.text_len)


def codec_config(options: argparse.Namespace) -> tuple[DecoderConfig, int]:
    """A decoder, and the channels of its latents."""
    if options.slug is None:
        config = WanVAEConfig(dim=options.vae_dim, dtype=options.dtype, checkpoint_path=f"random:{options.seed}")
        return config, config.z_dim
    pipeline = get_runner(options.slug).pipeline
    network: Any = pipeline.diffusion_model.transformer.network
    if pipeline.decoder is None:
        raise UserError(f"{options.slug} has no decoder")
    return pipeline.decoder, network.out_dim


def _network(options: argparse.Namespace, **more: Any) -> WanNetworkConfig:
    return WanNetworkConfig(
        dim=options.dim, num_heads=options.heads, ffn_dim=options.ffn_dim, num_layers=options.layers, **more
    )
