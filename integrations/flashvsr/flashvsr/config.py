"""Static configs of FlashVSR (torch-free)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from flashdreams.config import ConfigError, derive_config
from flashdreams.core.controls import ControlSpec
from flashdreams.infra.config import (
    DecoderConfig,
    DiffusionModelConfig,
    DType,
    EncoderConfig,
    PipelineConfig,
    TextEncoderConfig,
)
from flashdreams.infra.postprocess import PipelinePostprocessorConfig, VideoRunnerConfig
from flashdreams.infra.scheduler.config import FewStepSchedulerConfig
from flashdreams.recipes.wan.config import WanNetworkConfig, WanTransformerConfig
from flashdreams.recipes.wan.vae_config import WanVAEConfig

FLASHDREAMS_API = 1

Colour = Literal["adain", "wavelet", "none"]


@dataclass(frozen=True, kw_only=True)
class FlashVSRNetworkConfig(WanNetworkConfig):
    """Wan2.1 1.3B whose self-attention reads selected windows."""

    _target: ClassVar[str] = "flashvsr._network:FlashVSRNetwork"
    window: tuple[int, int, int] = (2, 8, 8)
    """Frames, rows and columns of the windows of tokens that are selected as a whole."""
    sparse_ratio: float = 2.0
    """How many windows of keys a window of queries reads on average, in units of 60 (a row has 60 at 768x1280), at any
    size. 2.0 is the published choice for stability, 1.5 for speed."""
    local_range: int = 11
    """Windows down and across that a window may read from. 11, or 9 for sharper pictures, as published."""
    sparse_attention: str = "auto"
    """Backend of the block-sparse attention; ``auto`` takes the best one here."""

    def validate(self) -> None:
        super().validate()
        if len(self.window) != 3 or min(self.window) < 1:
            raise ConfigError(f"window is {self.window}; expected frames, rows and columns, each at least 1")
        if not (math.isfinite(self.sparse_ratio) and self.sparse_ratio > 0):
            raise ConfigError(f"sparse_ratio is {self.sparse_ratio}; expected a finite number above 0")
        if self.local_range < 1:
            raise ConfigError(f"local_range is {self.local_range}; expected a number of windows of at least 1")


@dataclass(frozen=True, kw_only=True)
class FlashVSRTransformerConfig(WanTransformerConfig):
    """Six latent frames in the first call, two in each later one; one pass each, and no commit pass.

    The original's ``kv_ratio`` r, rows of two latent frames kept from the past, is ``window_size_t = 2 * (r + 1)``.
    """

    _target: ClassVar[str] = "flashvsr._transformer:FlashVSRTransformer"
    network: FlashVSRNetworkConfig = FlashVSRNetworkConfig()
    len_t: int = 2
    first_len_t: int | None = 6
    window_size_t: int | None = 8

    @property
    def spatial_patch(self) -> int:
        """Latent rows and columns of a window: sizes are whole windows."""
        return self.network.patch_size[1] * self.network.window[1]

    def validate(self) -> None:
        super().validate()
        frames, rows, columns = self.network.window
        if rows != columns:
            raise ConfigError(f"window is {self.network.window}; its rows and columns must be equal")
        lengths = {"len_t": self.len_t, "first_len_t": self.first_len_t, "window_size_t": self.window_size_t}
        if wrong := [name for name, length in lengths.items() if length is None or length % frames]:
            raise ConfigError(f"{wrong[0]} is {lengths[wrong[0]]}; expected whole windows of {frames} latent frames")
        if self.sink_size_t or self.rope != "absolute" or self.guidance_scale != 1 or self.context_noise:
            raise ConfigError(
                f"sink_size_t={self.sink_size_t}, rope={self.rope!r}, guidance_scale={self.guidance_scale}, "
                f"context_noise={self.context_noise}; this model has neither sink, relative positions, guidance nor a "
                "commit pass: leave them as they are"
            )


@dataclass(frozen=True, kw_only=True)
class LowQualityEncoderConfig(EncoderConfig):
    """The frames to make larger: scaled, and projected to tokens. Its weights are the published ``LQ_proj_in``."""

    _target: ClassVar[str] = "flashvsr._encoder:LowQualityEncoder"
    lookahead: ClassVar[int] = 4
    dtype: DType = "bfloat16"
    carries_past: bool = True
    """Whether a slice of four frames sees the end of the one before it (version 1.1) or its own end (version 1.0). The
    weights of the two have the same names and shapes, so nothing notices the wrong one."""
    hidden_dims: tuple[int, int] = (2048, 3072)
    dim: int = 1536
    """Width of the network."""
    scale: int = 4

    @property
    def takes(self) -> ControlSpec:
        """Frames of a video."""
        return ControlSpec(frame=True)

    def parse_controls(self, source: str, frames: int) -> Sequence[Any]:
        """Refused: frames are no words."""
        raise ValueError(f"this model takes the frames of a video (--video FILE), no controls; got {source[:40]!r}")

    def validate(self) -> None:
        if self.scale < 1:
            raise ConfigError(f"scale is {self.scale}; expected a whole number of at least 1")


@dataclass(frozen=True, kw_only=True)
class FixedPromptConfig(TextEncoderConfig):
    """The one prompt that the model was trained with, as its embedding."""

    _target: ClassVar[str] = "flashvsr._text:FixedPrompt"
    dtype: DType = "bfloat16"
    text_len: int = 512
    text_dim: int = 4096
    state_dict_transform: str | None = field(default="flashvsr._text:sole_tensor", metadata={"names_code": True})


@dataclass(frozen=True, kw_only=True)
class TCDecoderConfig(DecoderConfig):
    """The tiny decoder, which also sees the low-quality frames, and the colour correction after it."""

    _target: ClassVar[str] = "flashvsr._decoder:TCDecoder"
    dtype: DType = "bfloat16"
    latent_channels: int = 16
    dims: tuple[int, int, int, int] = (512, 256, 128, 128)
    """Channels at 1/8, 1/4, 1/2 and all of the size."""
    latents_per_pass: int = 1
    """Latents that go through the layers together; more is faster and takes more memory."""
    colour: Colour = "adain"
    """``adain``: mean and deviation per frame and channel, as published; ``wavelet``: all that is larger than details;
    ``none``."""

    def validate(self) -> None:
        if min(self.latent_channels, self.latents_per_pass, *self.dims) < 1:
            raise ConfigError(
                f"latent_channels={self.latent_channels}, dims={self.dims}, latents_per_pass={self.latents_per_pass}; "
                "all must be at least 1"
            )


@dataclass(frozen=True, kw_only=True)
class ColouredVAEConfig(WanVAEConfig):
    """The Wan2.1 VAE with the colour correction after it."""

    _target: ClassVar[str] = "flashvsr._decoder:ColouredVAE"
    colour: Colour = "adain"
    """As for the tiny decoder."""


_V1_1 = "hf://JunhaoZhuang/FlashVSR-v1.1/"
_V1_0 = "hf://JunhaoZhuang/FlashVSR/"
_DIT = "diffusion_pytorch_model_streaming_dmd.safetensors"

PIPELINE_FLASHVSR_X4 = PipelineConfig(
    name="flashvsr-x4",
    text_encoder=FixedPromptConfig(checkpoint_path=_V1_1 + "posi_prompt.pth"),
    encoder=LowQualityEncoderConfig(checkpoint_path=_V1_1 + "LQ_proj_in.ckpt"),
    diffusion_model=DiffusionModelConfig(
        transformer=FlashVSRTransformerConfig(checkpoint_path=_V1_1 + _DIT),
        scheduler=FewStepSchedulerConfig(num_steps=1, denoising_steps=(1000,), warp=False),
    ),
    decoder=TCDecoderConfig(checkpoint_path=_V1_1 + "TCDecoder.ckpt"),
    height=768,
    width=1280,
    fps=30.0,
)

PIPELINE_FLASHVSR_V1_0_X4 = derive_config(
    PIPELINE_FLASHVSR_X4,
    {
        "name": "flashvsr-v1.0-x4",
        "text_encoder.checkpoint_path": _V1_0 + "posi_prompt.pth",
        "encoder": {"checkpoint_path": _V1_0 + "LQ_proj_in.ckpt", "carries_past": False},
        "diffusion_model.transformer.checkpoint_path": _V1_0 + _DIT,
        "decoder.checkpoint_path": _V1_0 + "TCDecoder.ckpt",
    },
)

PIPELINE_FLASHVSR_X4_VAE = derive_config(
    PIPELINE_FLASHVSR_X4,
    name="flashvsr-x4-vae",
    decoder=ColouredVAEConfig(dtype="bfloat16", checkpoint_path="hf://Wan-AI/Wan2.1-T2V-1.3B/Wan2.1_VAE.pth"),
)

RUNNER_FLASHVSR_X4 = VideoRunnerConfig(
    runner_name="flashvsr-x4",
    description="FlashVSR v1.1: a video file (--video) four times as large, streamed; licence: Apache-2.0",
    pipeline=PIPELINE_FLASHVSR_X4,
)

RUNNER_FLASHVSR_V1_0_X4 = VideoRunnerConfig(
    runner_name="flashvsr-v1.0-x4",
    description="FlashVSR v1.0, the first weights; licence: Apache-2.0",
    pipeline=PIPELINE_FLASHVSR_V1_0_X4,
)

RUNNER_FLASHVSR_X4_VAE = VideoRunnerConfig(
    runner_name="flashvsr-x4-vae",
    description="FlashVSR v1.1 decoded by the Wan2.1 VAE instead of the tiny decoder; licence: Apache-2.0",
    pipeline=PIPELINE_FLASHVSR_X4_VAE,
)

FLASHVSR_CONFIGS = {
    runner.runner_name: runner for runner in (RUNNER_FLASHVSR_X4, RUNNER_FLASHVSR_V1_0_X4, RUNNER_FLASHVSR_X4_VAE)
}

FLASHVSR_POSTPROCESSORS = {
    name: PipelinePostprocessorConfig(
        name=name, description=runner.description, pipeline=runner.pipeline, scale=runner.scale
    )
    for name, runner in FLASHVSR_CONFIGS.items()
}
