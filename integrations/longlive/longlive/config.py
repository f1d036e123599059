"""Static configs of LongLive 1.0 and 2.0 (torch-free). Values: NVlabs/LongLive, configs/longlive_inference.yaml."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashdreams.config import ConfigError, InstantiateConfig
from flashdreams.infra.config import DiffusionModelConfig, PipelineConfig, RunnerConfig
from flashdreams.infra.scheduler.config import FewStepSchedulerConfig, UniPCSchedulerConfig
from flashdreams.recipes.wan.config import WanNetworkConfig, WanTransformerConfig
from flashdreams.recipes.wan.umt5_config import UMT5Config
from flashdreams.recipes.wan.vae_config import WanVAE22Config, WanVAEConfig

if TYPE_CHECKING:
    from flashdreams.infra.transformer import Transformer

FLASHDREAMS_API = 1

_MODEL = "hf://Efficient-Large-Model/LongLive-1.3B/models/"
_WAN21 = "hf://Wan-AI/Wan2.1-T2V-1.3B/"


@dataclass(frozen=True, kw_only=True)
class MergedLoraConfig(InstantiateConfig):
    """A LoRA without which a model's base weights are not the published model."""

    checkpoint_path: str
    """A LoRA in any of the forms that ``--lora`` takes. Random weights (``random:SEED``) have none."""
    weight: float = 1.0
    """0 leaves it out, for weights that it is merged into already."""

    def validate(self) -> None:
        if not math.isfinite(self.weight):
            raise ConfigError(f"weight is {self.weight}; expected a finite number, such as 1")


@dataclass(frozen=True, kw_only=True)
class LongLiveTransformerConfig(WanTransformerConfig):
    """A Wan transformer whose weights are published as a base and a LoRA."""

    lora: MergedLoraConfig | None = None
    """Merged into the weights, for good, when they are loaded. LoRAs of ``--lora`` come on top of it."""

    def setup(self, *, device: str = "cpu") -> Transformer:
        from longlive._lora import merge

        return merge(super().setup(device=device), self.lora)


PIPELINE_LONGLIVE_T2V_1_3B = PipelineConfig(
    name="longlive-t2v-1.3b",
    text_encoder=UMT5Config(checkpoint_path=_WAN21 + "models_t5_umt5-xxl-enc-bf16.pth"),
    diffusion_model=DiffusionModelConfig(
        transformer=LongLiveTransformerConfig(
            checkpoint_path=_MODEL + "longlive_base.pt",
            lora=MergedLoraConfig(checkpoint_path=_MODEL + "lora.pt"),
            len_t=3,
            window_size_t=12,
            sink_size_t=3,
            prompt_policy="recache",
            recache_sink=False,
        ),
        scheduler=FewStepSchedulerConfig(num_steps=4, denoising_steps=(1000, 750, 500, 250), shift=5.0, warp=True),
    ),
    decoder=WanVAEConfig(checkpoint_path=_WAN21 + "Wan2.1_VAE.pth"),
    height=480,
    width=832,
    fps=16.0,
)

PIPELINE_LONGLIVE2_TI2V_5B = PipelineConfig(
    name="longlive2-ti2v-5b",
    text_encoder=UMT5Config(checkpoint_path=_WAN21 + "models_t5_umt5-xxl-enc-bf16.pth"),
    diffusion_model=DiffusionModelConfig(
        transformer=LongLiveTransformerConfig(
            network=WanNetworkConfig(dim=3072, ffn_dim=14336, num_heads=24, in_dim=48, out_dim=48),
            # Where the authors publish it is not known to us: put it here, or name it with --ckpt-path.
            checkpoint_path="checkpoints/longlive2/generator.pt",
            len_t=8,
            window_size_t=32,
            sink_size_t=8,
            stamp_image_latent=True,
        ),
        scheduler=UniPCSchedulerConfig(num_steps=4, shift=5.0, table="native"),
    ),
    decoder=WanVAE22Config(checkpoint_path="hf://Wan-AI/Wan2.2-TI2V-5B/Wan2.2_VAE.pth"),
    image_size="cells",
    height=704,
    width=1280,
    fps=24.0,
)

RUNNER_LONGLIVE_T2V_1_3B = RunnerConfig(
    runner_name="longlive-t2v-1.3b",
    description="LongLive 1.3B: 480p video without end, prompts change on the way "
    "(licence: CC BY-NC-SA 4.0, non-commercial)",
    prompt="A ginger cat walks along a garden wall at sunset, warm light, the camera follows it slowly",
    default_num_frames=321,
    pipeline=PIPELINE_LONGLIVE_T2V_1_3B,
)

RUNNER_LONGLIVE2_TI2V_5B = RunnerConfig(
    runner_name="longlive2-ti2v-5b",
    description="LongLive 2.0 5B: 704p video without end from text or a first image (licence: Apache-2.0)",
    prompt="A ginger cat walks along a garden wall at sunset, warm light, the camera follows it slowly",
    default_num_frames=509,
    pipeline=PIPELINE_LONGLIVE2_TI2V_5B,
)

LONGLIVE_CONFIGS = {runner.runner_name: runner for runner in (RUNNER_LONGLIVE_T2V_1_3B, RUNNER_LONGLIVE2_TI2V_5B)}
