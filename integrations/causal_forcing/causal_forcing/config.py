"""Static configs of Causal-Forcing (torch-free): Self-Forcing's network and loop with other weights and chunk lengths.

Values: thu-ml/Causal-Forcing, configs/causal_forcing_dmd_chunkwise.yaml and configs/causal_forcing_dmd_framewise.yaml.
"""

from __future__ import annotations

from flashdreams.config import derive_config
from flashdreams.infra.config import DiffusionModelConfig, PipelineConfig, RunnerConfig
from flashdreams.infra.scheduler.config import FewStepSchedulerConfig
from flashdreams.recipes.wan.config import WanTransformerConfig
from flashdreams.recipes.wan.umt5_config import UMT5Config
from flashdreams.recipes.wan.vae_config import WanVAEConfig

FLASHDREAMS_API = 1

_MODEL = "hf://zhuhz22/Causal-Forcing/"
_WAN21 = "hf://Wan-AI/Wan2.1-T2V-1.3B/"

PIPELINE_CAUSAL_FORCING_T2V_1_3B = PipelineConfig(
    name="causal-forcing-t2v-1.3b",
    text_encoder=UMT5Config(checkpoint_path=_WAN21 + "models_t5_umt5-xxl-enc-bf16.pth"),
    diffusion_model=DiffusionModelConfig(
        transformer=WanTransformerConfig(
            checkpoint_path=_MODEL + "chunkwise/causal_forcing.pt",
            len_t=3,
            window_size_t=21,
            trained_frames=21,
        ),
        scheduler=FewStepSchedulerConfig(num_steps=4, denoising_steps=(1000, 750, 500, 250), shift=5.0, warp=True),
    ),
    decoder=WanVAEConfig(checkpoint_path=_WAN21 + "Wan2.1_VAE.pth"),
    height=480,
    width=832,
    fps=16.0,
)

PIPELINE_CAUSAL_FORCING_T2V_1_3B_FRAMEWISE = derive_config(
    PIPELINE_CAUSAL_FORCING_T2V_1_3B,
    name="causal-forcing-t2v-1.3b-framewise",
    diffusion_model={"transformer": {"checkpoint_path": _MODEL + "framewise/causal_forcing.pt", "len_t": 1}},
)

# The same weights: a given picture is committed at timestep 0 as the first latent frame, alone.
PIPELINE_CAUSAL_FORCING_I2V_1_3B = derive_config(
    PIPELINE_CAUSAL_FORCING_T2V_1_3B,
    name="causal-forcing-i2v-1.3b",
    diffusion_model={"transformer": {"first_len_t": 1}},
)

PIPELINE_CAUSAL_FORCING_I2V_1_3B_FRAMEWISE = derive_config(
    PIPELINE_CAUSAL_FORCING_T2V_1_3B_FRAMEWISE, name="causal-forcing-i2v-1.3b-framewise"
)

RUNNER_CAUSAL_FORCING_T2V_1_3B = RunnerConfig(
    runner_name="causal-forcing-t2v-1.3b",
    description="Causal-Forcing 1.3B: 480p video from text in 4 steps, chunk by chunk (licence: Apache-2.0)",
    prompt="A ginger cat walks along a garden wall at sunset, warm light, the camera follows it slowly",
    default_num_frames=81,
    pipeline=PIPELINE_CAUSAL_FORCING_T2V_1_3B,
)

RUNNER_CAUSAL_FORCING_T2V_1_3B_FRAMEWISE = derive_config(
    RUNNER_CAUSAL_FORCING_T2V_1_3B,
    runner_name="causal-forcing-t2v-1.3b-framewise",
    description="Causal-Forcing 1.3B: 480p video from text in 4 steps, frame by frame (licence: Apache-2.0)",
    pipeline=PIPELINE_CAUSAL_FORCING_T2V_1_3B_FRAMEWISE,
)

RUNNER_CAUSAL_FORCING_I2V_1_3B = derive_config(
    RUNNER_CAUSAL_FORCING_T2V_1_3B,
    runner_name="causal-forcing-i2v-1.3b",
    description="Causal-Forcing 1.3B: 480p video from a first image, chunk by chunk (licence: Apache-2.0)",
    prompt="The scene comes to life, natural motion, the camera stays still",
    default_num_frames=73,
    pipeline=PIPELINE_CAUSAL_FORCING_I2V_1_3B,
)

RUNNER_CAUSAL_FORCING_I2V_1_3B_FRAMEWISE = derive_config(
    RUNNER_CAUSAL_FORCING_I2V_1_3B,
    runner_name="causal-forcing-i2v-1.3b-framewise",
    description="Causal-Forcing 1.3B: 480p video from a first image, frame by frame (licence: Apache-2.0)",
    default_num_frames=81,
    pipeline=PIPELINE_CAUSAL_FORCING_I2V_1_3B_FRAMEWISE,
)

CAUSAL_FORCING_CONFIGS = {
    runner.runner_name: runner
    for runner in (
        RUNNER_CAUSAL_FORCING_T2V_1_3B,
        RUNNER_CAUSAL_FORCING_T2V_1_3B_FRAMEWISE,
        RUNNER_CAUSAL_FORCING_I2V_1_3B,
        RUNNER_CAUSAL_FORCING_I2V_1_3B_FRAMEWISE,
    )
}
