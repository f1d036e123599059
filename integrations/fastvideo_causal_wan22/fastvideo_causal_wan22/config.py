"""Static configs of FastVideo's causal Wan2.2 A14B (torch-free). Values: hao-ai-lab/FastVideo, causal_denoising.py."""

from __future__ import annotations

from flashdreams.config import derive_config
from flashdreams.infra.config import DiffusionModelConfig, ExpertConfig, PipelineConfig, RunnerConfig
from flashdreams.infra.scheduler.config import BoundaryFewStepSchedulerConfig
from flashdreams.recipes.wan.config import WanNetworkConfig, WanTransformerConfig
from flashdreams.recipes.wan.umt5_config import UMT5Config
from flashdreams.recipes.wan.vae_config import WanVAEConfig

FLASHDREAMS_API = 1

_MODEL = "hf://FastVideo/CausalWan2.2-I2V-A14B-Preview-Diffusers/"
_WAN21 = "hf://Wan-AI/Wan2.1-T2V-1.3B/"

_BOUNDARY = 0.875

_LOW_NOISE = WanTransformerConfig(
    # No mask and no image channels: the picture's latent is committed as context.
    network=WanNetworkConfig(dim=5120, ffn_dim=13824, num_heads=40, num_layers=40),
    checkpoint_path=_MODEL + "transformer_2",
    len_t=3,
    first_len_t=1,
    window_size_t=21,
    trained_frames=21,
)

PIPELINE_FASTVIDEO_CAUSAL_WAN22_I2V_A14B = PipelineConfig(
    name="fastvideo-causal-wan22-i2v-a14b",
    text_encoder=UMT5Config(checkpoint_path=_WAN21 + "models_t5_umt5-xxl-enc-bf16.pth"),
    diffusion_model=DiffusionModelConfig(
        transformer=_LOW_NOISE,
        high_noise=(
            ExpertConfig(
                sigma_low=_BOUNDARY,
                transformer=derive_config(_LOW_NOISE, checkpoint_path=_MODEL + "transformer"),
            ),
        ),
        scheduler=BoundaryFewStepSchedulerConfig(
            num_steps=8,
            denoising_steps=(1000, 850, 700, 550, 350, 275, 200, 125),
            shift=12.0,
            boundary=_BOUNDARY,
        ),
    ),
    decoder=WanVAEConfig(checkpoint_path=_WAN21 + "Wan2.1_VAE.pth"),
    height=480,
    width=832,
    fps=16.0,
)

RUNNER_FASTVIDEO_CAUSAL_WAN22_I2V_A14B = RunnerConfig(
    runner_name="fastvideo-causal-wan22-i2v-a14b",
    description="FastVideo CausalWan2.2 A14B: 480p video from a first image in 8 steps, chunk by chunk "
    "(licence: Apache-2.0)",
    prompt="The scene comes to life, natural motion, the camera stays still",
    default_num_frames=73,
    pipeline=PIPELINE_FASTVIDEO_CAUSAL_WAN22_I2V_A14B,
)

FASTVIDEO_CAUSAL_WAN22_CONFIGS = {
    RUNNER_FASTVIDEO_CAUSAL_WAN22_I2V_A14B.runner_name: RUNNER_FASTVIDEO_CAUSAL_WAN22_I2V_A14B
}
