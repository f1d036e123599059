"""Static configs of Wan2.2 (torch-free)."""

from __future__ import annotations

from flashdreams.config import derive_config
from flashdreams.infra.config import DiffusionModelConfig, ExpertConfig, PipelineConfig, RunnerConfig
from flashdreams.infra.scheduler.config import UniPCSchedulerConfig
from flashdreams.recipes.wan.config import WanNetworkConfig, WanTransformerConfig
from flashdreams.recipes.wan.umt5_config import UMT5Config
from flashdreams.recipes.wan.vae_config import WanVAE22Config, WanVAEConfig

FLASHDREAMS_API = 1

NEGATIVE_PROMPT = (
    "色调艳丽，过曝，静态，细节模糊不清，字幕，风格，作品，画作，画面，静止，整体发灰，最差质量，低质量，JPEG压缩残留，"
    "丑陋的，残缺的，多余的手指，画得不好的手部，画得不好的脸部，畸形的，毁容的，形态畸形的肢体，手指融合，静止不动的画面，"
    "杂乱的背景，三条腿，背景人很多，倒着走"
)
"""As published, for all models."""

# Of Wan2.1, which has the same text encoder and, the 5B apart, the same VAE: shared files are downloaded once.
_SHARED = "hf://Wan-AI/Wan2.1-T2V-1.3B/"
_TEXT_ENCODER = UMT5Config(checkpoint_path=_SHARED + "models_t5_umt5-xxl-enc-bf16.pth")

PIPELINE_WAN22_TI2V_5B = PipelineConfig(
    name="wan22-ti2v-5b",
    text_encoder=_TEXT_ENCODER,
    diffusion_model=DiffusionModelConfig(
        transformer=WanTransformerConfig(
            network=WanNetworkConfig(dim=3072, ffn_dim=14336, num_heads=24, num_layers=30, in_dim=48, out_dim=48),
            checkpoint_path="hf://Wan-AI/Wan2.2-TI2V-5B",
            len_t=31,
            trained_frames=31,
            stamp_image_latent=True,
            guidance_scale=5.0,
            cfg="sequential",  # as published; at these lengths a batch of two gains no time and doubles the activations
            negative_prompt=NEGATIVE_PROMPT,
        ),
        scheduler=UniPCSchedulerConfig(num_steps=50, shift=5.0),
    ),
    decoder=WanVAE22Config(checkpoint_path="hf://Wan-AI/Wan2.2-TI2V-5B/Wan2.2_VAE.pth"),
    image_size="cells",
    height=704,
    width=1280,
    fps=24.0,
)

_T2V_LOW = WanTransformerConfig(
    network=WanNetworkConfig(dim=5120, ffn_dim=13824, num_heads=40, num_layers=40),
    checkpoint_path="hf://Wan-AI/Wan2.2-T2V-A14B/low_noise_model",
    len_t=21,
    trained_frames=21,
    guidance_scale=3.0,
    cfg="sequential",
    negative_prompt=NEGATIVE_PROMPT,
)
_T2V_HIGH = derive_config(_T2V_LOW, checkpoint_path="hf://Wan-AI/Wan2.2-T2V-A14B/high_noise_model", guidance_scale=4.0)

PIPELINE_WAN22_T2V_A14B = PipelineConfig(
    name="wan22-t2v-a14b",
    text_encoder=_TEXT_ENCODER,
    diffusion_model=DiffusionModelConfig(
        transformer=_T2V_LOW,
        high_noise=(ExpertConfig(sigma_low=0.875, transformer=_T2V_HIGH),),
        swap_experts=True,
        scheduler=UniPCSchedulerConfig(num_steps=40, shift=12.0),
    ),
    decoder=WanVAEConfig(checkpoint_path=_SHARED + "Wan2.1_VAE.pth"),
    height=720,
    width=1280,
    fps=16.0,
)

PIPELINE_WAN22_I2V_A14B = derive_config(
    PIPELINE_WAN22_T2V_A14B,
    {
        "name": "wan22-i2v-a14b",
        "diffusion_model.transformer": {
            "network": {"in_dim": 36},
            "checkpoint_path": "hf://Wan-AI/Wan2.2-I2V-A14B/low_noise_model",
            "concat_image_mask_to_latent": True,
            "guidance_scale": 3.5,
        },
        "diffusion_model.high_noise.0": {
            "sigma_low": 0.9,
            "transformer": {
                "network": {"in_dim": 36},
                "checkpoint_path": "hf://Wan-AI/Wan2.2-I2V-A14B/high_noise_model",
                "concat_image_mask_to_latent": True,
                "guidance_scale": 3.5,
            },
        },
        "diffusion_model.scheduler.shift": 5.0,
        "image_size": "area",
    },
)

RUNNER_WAN22_TI2V_5B = RunnerConfig(
    runner_name="wan22-ti2v-5b",
    description="Wan2.2 5B: five seconds of 704p at 24 fps from text, or a first image and text (licence: Apache-2.0)",
    prompt="A ginger cat walks along a garden wall at sunset, warm light, the camera follows it slowly",
    default_num_frames=121,
    pipeline=PIPELINE_WAN22_TI2V_5B,
)

RUNNER_WAN22_T2V_A14B = RunnerConfig(
    runner_name="wan22-t2v-a14b",
    description="Wan2.2 A14B, two experts: five seconds of 720p video from text (licence: Apache-2.0)",
    prompt="A ginger cat walks along a garden wall at sunset, warm light, the camera follows it slowly",
    default_num_frames=81,
    pipeline=PIPELINE_WAN22_T2V_A14B,
)

RUNNER_WAN22_I2V_A14B = RunnerConfig(
    runner_name="wan22-i2v-a14b",
    description="Wan2.2 A14B, two experts: five seconds of 720p from a first image and text (licence: Apache-2.0)",
    prompt="The scene comes to life, natural motion, the camera stays still",
    default_num_frames=81,
    pipeline=PIPELINE_WAN22_I2V_A14B,
)

WAN22_CONFIGS = {
    runner.runner_name: runner for runner in (RUNNER_WAN22_TI2V_5B, RUNNER_WAN22_T2V_A14B, RUNNER_WAN22_I2V_A14B)
}
