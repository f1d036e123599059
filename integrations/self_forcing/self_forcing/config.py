"""Static configs of Self-Forcing (torch-free). Values: guandeh17/Self-Forcing, configs/self_forcing_dmd.yaml."""

from __future__ import annotations

from flashdreams.config import derive_config
from flashdreams.infra.config import DiffusionModelConfig, PipelineConfig, RunnerConfig
from flashdreams.infra.scheduler.config import FewStepSchedulerConfig
from flashdreams.recipes.taehv.config import TAEHVConfig
from flashdreams.recipes.wan.config import WanTransformerConfig
from flashdreams.recipes.wan.umt5_config import UMT5Config
from flashdreams.recipes.wan.vae_config import WanVAEConfig

FLASHDREAMS_API = 1

_WAN21 = "hf://Wan-AI/Wan2.1-T2V-1.3B/"

PIPELINE_SELF_FORCING_T2V_1_3B = PipelineConfig(
    name="self-forcing-t2v-1.3b",
    text_encoder=UMT5Config(checkpoint_path=_WAN21 + "models_t5_umt5-xxl-enc-bf16.pth"),
    diffusion_model=DiffusionModelConfig(
        transformer=WanTransformerConfig(
            checkpoint_path="hf://gdhe17/Self-Forcing/checkpoints/self_forcing_dmd.pt",
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

PIPELINE_SELF_FORCING_T2V_1_3B_TAEHV = derive_config(
    PIPELINE_SELF_FORCING_T2V_1_3B,
    name="self-forcing-t2v-1.3b-taehv",
    # The author publishes taew2_1.pth beside the code, which no hub address names; this is a copy of it.
    decoder=TAEHVConfig(checkpoint_path="hf://Kijai/WanVideo_comfy/taew2_1.safetensors"),
)

# A preset of ours: the authors have none for more than 21 latent frames. With relative positions and a window within
# the trained length, attention never sees a distance that training did not have; the first chunk stays as an anchor.
PIPELINE_SELF_FORCING_T2V_1_3B_LONG = derive_config(
    PIPELINE_SELF_FORCING_T2V_1_3B,
    name="self-forcing-t2v-1.3b-long",
    diffusion_model={
        "transformer": {"window_size_t": 12, "sink_size_t": 3, "rope": "cache_relative", "trained_frames": None}
    },
)

RUNNER_SELF_FORCING_T2V_1_3B = RunnerConfig(
    runner_name="self-forcing-t2v-1.3b",
    description="Self-Forcing 1.3B: 480p video from text in 4 steps, chunk by chunk (licence: Apache-2.0)",
    prompt="A ginger cat walks along a garden wall at sunset, warm light, the camera follows it slowly",
    default_num_frames=81,
    pipeline=PIPELINE_SELF_FORCING_T2V_1_3B,
)

RUNNER_SELF_FORCING_T2V_1_3B_TAEHV = derive_config(
    RUNNER_SELF_FORCING_T2V_1_3B,
    runner_name="self-forcing-t2v-1.3b-taehv",
    description="Self-Forcing 1.3B with the tiny VAE: decodes faster, less exact (licence: Apache-2.0; tiny VAE: MIT)",
    pipeline=PIPELINE_SELF_FORCING_T2V_1_3B_TAEHV,
)

RUNNER_SELF_FORCING_T2V_1_3B_LONG = derive_config(
    RUNNER_SELF_FORCING_T2V_1_3B,
    runner_name="self-forcing-t2v-1.3b-long",
    description="Self-Forcing 1.3B without end: sink, short window, relative positions (licence: Apache-2.0)",
    default_num_frames=321,
    pipeline=PIPELINE_SELF_FORCING_T2V_1_3B_LONG,
)

SELF_FORCING_CONFIGS = {
    runner.runner_name: runner
    for runner in (RUNNER_SELF_FORCING_T2V_1_3B, RUNNER_SELF_FORCING_T2V_1_3B_TAEHV, RUNNER_SELF_FORCING_T2V_1_3B_LONG)
}
