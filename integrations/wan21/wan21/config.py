"""Static configs of Wan2.1 (torch-free)."""

from __future__ import annotations

from flashdreams.config import derive_config
from flashdreams.infra.config import DiffusionModelConfig, PipelineConfig, RunnerConfig
from flashdreams.infra.scheduler.config import UniPCSchedulerConfig
from flashdreams.recipes.wan.clip_config import CLIPVisionConfig
from flashdreams.recipes.wan.config import WanNetworkConfig, WanTransformerConfig
from flashdreams.recipes.wan.umt5_config import UMT5Config
from flashdreams.recipes.wan.vae_config import WanVAEConfig

FLASHDREAMS_API = 1

NEGATIVE_PROMPT = (
    "色调艳丽，过曝，静态，细节模糊不清，字幕，风格，作品，画作，画面，静止，整体发灰，最差质量，低质量，JPEG压缩残留，"
    "丑陋的，残缺的，多余的手指，画得不好的手部，画得不好的脸部，畸形的，毁容的，形态畸形的肢体，手指融合，静止不动的画面，"
    "杂乱的背景，三条腿，背景人很多，倒着走"
)
"""As published, of text-to-video."""
NEGATIVE_PROMPT_I2V = "镜头晃动，" + NEGATIVE_PROMPT
NEGATIVE_PROMPT_FLF2V = "镜头切换，" + NEGATIVE_PROMPT_I2V

# Every repository of the family has the same text encoder and VAE; taken from one, they are downloaded once.
_SHARED = "hf://Wan-AI/Wan2.1-T2V-1.3B/"
_CLIP = "hf://Wan-AI/Wan2.1-I2V-14B-480P/models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth"

PIPELINE_WAN21_T2V_1_3B = PipelineConfig(
    name="wan21-t2v-1.3b",
    text_encoder=UMT5Config(checkpoint_path=_SHARED + "models_t5_umt5-xxl-enc-bf16.pth"),
    diffusion_model=DiffusionModelConfig(
        transformer=WanTransformerConfig(
            checkpoint_path="hf://Wan-AI/Wan2.1-T2V-1.3B",
            len_t=21,
            trained_frames=21,
            guidance_scale=5.0,
            cfg="sequential",  # as published; at these lengths a batch of two gains no time and doubles the activations
            negative_prompt=NEGATIVE_PROMPT,
        ),
        scheduler=UniPCSchedulerConfig(num_steps=50, shift=5.0),
    ),
    decoder=WanVAEConfig(checkpoint_path=_SHARED + "Wan2.1_VAE.pth"),
    height=480,
    width=832,
    fps=16.0,
)

PIPELINE_WAN21_T2V_14B = derive_config(
    PIPELINE_WAN21_T2V_1_3B,
    name="wan21-t2v-14b",
    diffusion_model={
        "transformer": {
            "checkpoint_path": "hf://Wan-AI/Wan2.1-T2V-14B",
            "network": WanNetworkConfig(dim=5120, ffn_dim=13824, num_heads=40, num_layers=40),
        }
    },
    height=720,
    width=1280,
)

PIPELINE_WAN21_I2V_14B_480P = derive_config(
    PIPELINE_WAN21_T2V_14B,
    name="wan21-i2v-14b-480p",
    diffusion_model={
        "transformer": {
            "checkpoint_path": "hf://Wan-AI/Wan2.1-I2V-14B-480P",
            "network": {"in_dim": 36, "image_dim": 1280},
            "concat_image_mask_to_latent": True,
            "negative_prompt": NEGATIVE_PROMPT_I2V,
        },
        "scheduler": {"num_steps": 40, "shift": 3.0},
    },
    image_encoder=CLIPVisionConfig(checkpoint_path=_CLIP),
    image_size="area",
    height=480,
    width=832,
)

PIPELINE_WAN21_I2V_14B_720P = derive_config(
    PIPELINE_WAN21_I2V_14B_480P,
    name="wan21-i2v-14b-720p",
    diffusion_model={
        "transformer": {"checkpoint_path": "hf://Wan-AI/Wan2.1-I2V-14B-720P"},
        "scheduler": {"shift": 5.0},
    },
    height=720,
    width=1280,
)

PIPELINE_WAN21_FLF2V_14B_720P = derive_config(
    PIPELINE_WAN21_I2V_14B_720P,
    name="wan21-flf2v-14b-720p",
    diffusion_model={
        "transformer": {
            "checkpoint_path": "hf://Wan-AI/Wan2.1-FLF2V-14B-720P",
            "network": {"image_tokens": 514, "image_positions": True},
            "takes_last_image": True,
            "negative_prompt": NEGATIVE_PROMPT_FLF2V,
        },
        "scheduler": {"num_steps": 50, "shift": 16.0},
    },
)

RUNNER_WAN21_T2V_1_3B = RunnerConfig(
    runner_name="wan21-t2v-1.3b",
    description="Wan2.1 1.3B: five seconds of 480p video from text (licence: Apache-2.0)",
    prompt="A ginger cat walks along a garden wall at sunset, warm light, the camera follows it slowly",
    default_num_frames=81,
    pipeline=PIPELINE_WAN21_T2V_1_3B,
)

RUNNER_WAN21_T2V_14B = derive_config(
    RUNNER_WAN21_T2V_1_3B,
    runner_name="wan21-t2v-14b",
    description="Wan2.1 14B: five seconds of 720p or 480p video from text (licence: Apache-2.0)",
    pipeline=PIPELINE_WAN21_T2V_14B,
)

RUNNER_WAN21_I2V_14B_480P = derive_config(
    RUNNER_WAN21_T2V_14B,
    runner_name="wan21-i2v-14b-480p",
    description="Wan2.1 I2V 14B: five seconds of 480p video from a first image and text (licence: Apache-2.0)",
    prompt="The scene comes to life, natural motion, the camera stays still",
    pipeline=PIPELINE_WAN21_I2V_14B_480P,
)

RUNNER_WAN21_I2V_14B_720P = derive_config(
    RUNNER_WAN21_I2V_14B_480P,
    runner_name="wan21-i2v-14b-720p",
    description="Wan2.1 I2V 14B: five seconds of 720p video from a first image and text (licence: Apache-2.0)",
    pipeline=PIPELINE_WAN21_I2V_14B_720P,
)

RUNNER_WAN21_FLF2V_14B_720P = derive_config(
    RUNNER_WAN21_I2V_14B_720P,
    runner_name="wan21-flf2v-14b-720p",
    description="Wan2.1 FLF2V 14B: five seconds of 720p video between a first and a last image (licence: Apache-2.0)",
    prompt="A smooth transition from the first picture to the last, natural motion",
    pipeline=PIPELINE_WAN21_FLF2V_14B_720P,
)

WAN21_CONFIGS = {
    runner.runner_name: runner
    for runner in (
        RUNNER_WAN21_T2V_1_3B,
        RUNNER_WAN21_T2V_14B,
        RUNNER_WAN21_I2V_14B_480P,
        RUNNER_WAN21_I2V_14B_720P,
        RUNNER_WAN21_FLF2V_14B_720P,
    )
}
