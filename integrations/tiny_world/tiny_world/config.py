"""Static configs of the built-in model (torch-free)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flashdreams.core.controls import ControlSpec
from flashdreams.infra.config import (
    DecoderConfig,
    DiffusionModelConfig,
    EncoderConfig,
    PipelineConfig,
    RunnerConfig,
    TextEncoderConfig,
)
from flashdreams.infra.scheduler.config import FlowMatchEulerSchedulerConfig
from flashdreams.recipes.wan.config import WanNetworkConfig, WanTransformerConfig
from tiny_world._words import ACTIONS, KEYS

_WEIGHTS = "package://tiny_world/weights/"


@dataclass(frozen=True, kw_only=True)
class TinyWorldNetworkConfig(WanNetworkConfig):
    """A Wan DiT of 4 M parameters with held keys as a second condition."""

    _target: ClassVar[str] = "tiny_world._network:TinyWorldNetwork"
    dim: int = 192
    ffn_dim: int = 768
    num_heads: int = 4
    num_layers: int = 6
    in_dim: int = 12
    out_dim: int = 12
    text_dim: int = 96
    text_len: int = 12
    rope_theta: float = 100.0
    action_dim: int = 32
    """Width of the embedding of one frame's action."""


@dataclass(frozen=True, kw_only=True)
class TinyTextEncoderConfig(TextEncoderConfig):
    """Word embeddings and two small transformer layers."""

    _target: ClassVar[str] = "tiny_world._text:TinyTextEncoder"
    dim: int = 96
    num_layers: int = 2
    num_heads: int = 4
    ffn_dim: int = 192

    @property
    def suggestions(self) -> tuple[str, ...]:
        return (
            "a green square bounces around on a black background",
            "a yellow triangle moves up on a striped gray background",
            "a cyan ring stays still on a brown background",
            "a white cross moves left on a blue background",
        )


@dataclass(frozen=True, kw_only=True)
class ActionEncoderConfig(EncoderConfig):
    """Held keys; has no weights."""

    _target: ClassVar[str] = "tiny_world._control:ActionEncoder"

    @property
    def takes(self) -> ControlSpec:
        return ControlSpec(words=ACTIONS, keys=KEYS)


@dataclass(frozen=True, kw_only=True)
class TinyWorldCodecConfig(DecoderConfig):
    """The folded causal codec."""

    _target: ClassVar[str] = "tiny_world._codec:TinyWorldCodec"
    spatial_compression: ClassVar[int] = 16
    temporal_compression: ClassVar[int] = 4
    channels: int = 12
    widths: tuple[int, int, int, int] = (24, 64, 96, 112)
    """Channels at 1/2, 1/4, 1/8 and 1/16 of the frame size."""


PIPELINE_TINY_WORLD = PipelineConfig(
    name="tiny-world",
    text_encoder=TinyTextEncoderConfig(checkpoint_path=_WEIGHTS + "text_encoder.safetensors"),
    encoder=ActionEncoderConfig(),
    diffusion_model=DiffusionModelConfig(
        transformer=WanTransformerConfig(
            network=TinyWorldNetworkConfig(),
            dtype="float32",
            checkpoint_path=_WEIGHTS + "network.safetensors",
            len_t=1,
            window_size_t=6,
            guidance_scale=2.5,
        ),
        scheduler=FlowMatchEulerSchedulerConfig(num_steps=4, shift=3.0),
    ),
    decoder=TinyWorldCodecConfig(checkpoint_path=_WEIGHTS + "codec.safetensors"),
    height=128,
    width=128,
    fps=16.0,
)

RUNNER_TINY_WORLD = RunnerConfig(
    runner_name="tiny-world",
    description="Built-in 6 M model: a coloured shape that moves as told, steered live; runs on any CPU",
    prompt="a red circle moves right on a blue background",
    pipeline=PIPELINE_TINY_WORLD,
)

TINY_WORLD_CONFIGS = {RUNNER_TINY_WORLD.runner_name: RUNNER_TINY_WORLD}
