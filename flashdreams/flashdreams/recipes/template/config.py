"""Static configs of the template (torch-free): what the command line lists, shows and changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from flashdreams.core.controls import ControlSpec
from flashdreams.infra.config import (
    DecoderConfig,
    DiffusionModelConfig,
    EncoderConfig,
    PipelineConfig,
    RunnerConfig,
    TextEncoderConfig,
)
from flashdreams.infra.scheduler import FlowMatchEulerSchedulerConfig
from flashdreams.recipes.wan.config import WanNetworkConfig, WanTransformerConfig

if TYPE_CHECKING:
    from flashdreams.infra.encoder import StreamingEncoder, TextEncoder

FLASHDREAMS_API = 1
"""The plugin API this package was written for."""


@dataclass(frozen=True, kw_only=True)
class TemplateTextConfig(TextEncoderConfig["TextEncoder"]):
    """Words to fixed random vectors."""

    _target: ClassVar[str] = "flashdreams.recipes.template.modules:TemplateTextEncoder"
    width: int = 16
    length: int = 8


@dataclass(frozen=True, kw_only=True)
class TemplateControlConfig(EncoderConfig["StreamingEncoder"]):
    """One brightness per frame."""

    _target: ClassVar[str] = "flashdreams.recipes.template.modules:TemplateControl"

    @property
    def takes(self) -> ControlSpec:
        return ControlSpec(number=(-1.0, 1.0))


@dataclass(frozen=True, kw_only=True)
class TemplateCodecConfig(DecoderConfig):
    """Mean colour of every 4 frames x 8 x 8 pixels."""

    _target: ClassVar[str] = "flashdreams.recipes.template.modules:TemplateCodec"


@dataclass(frozen=True, kw_only=True)
class TemplateNetworkConfig(WanNetworkConfig):
    """A Wan DiT with a brightness conditioner. Only ``_target`` and new fields stand here; sizes stand below."""

    _target: ClassVar[str] = "flashdreams.recipes.template.modules:TemplateNetwork"


PIPELINE_TEMPLATE = PipelineConfig(
    name="template",
    text_encoder=TemplateTextConfig(),
    encoder=TemplateControlConfig(),
    diffusion_model=DiffusionModelConfig(
        transformer=WanTransformerConfig(
            network=TemplateNetworkConfig(
                dim=48, ffn_dim=96, num_heads=2, num_layers=2, in_dim=3, out_dim=3, text_dim=16, text_len=8, freq_dim=32
            ),
            dtype="float32",
            state_dict_transform="flashdreams.recipes.template.remap:to_wan_keys",
            allow_missing=("brightness.weight",),
            len_t=2,
            first_len_t=1,
            window_size_t=7,
            sink_size_t=1,
        ),
        scheduler=FlowMatchEulerSchedulerConfig(num_steps=2, shift=3.0),
    ),
    decoder=TemplateCodecConfig(),
    height=32,
    width=48,
    fps=16.0,
)

RUNNER_TEMPLATE = RunnerConfig(
    runner_name="template",
    description="The integration to copy: a random network that makes coloured noise",
    prompt="a red circle",
    default_num_frames=17,
    pipeline=PIPELINE_TEMPLATE,
)

TEMPLATE_CONFIGS = {RUNNER_TEMPLATE.runner_name: RUNNER_TEMPLATE}
