"""Static configs of LingBot-World (torch-free)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from flashdreams.config import ConfigError, derive_config
from flashdreams.core.controls import Control, ControlSpec, Keys
from flashdreams.infra.config import DiffusionModelConfig, EncoderConfig, ExpertConfig, PipelineConfig, RunnerConfig
from flashdreams.infra.scheduler.config import IndexedFewStepSchedulerConfig, UniPCSchedulerConfig
from flashdreams.recipes.wan.config import WanNetworkConfig, WanTransformerConfig
from flashdreams.recipes.wan.umt5_config import UMT5Config
from flashdreams.recipes.wan.vae_config import WanVAEConfig
from lingbot._keys import KEYS, TRAJECTORIES, Trajectory

FLASHDREAMS_API = 1
FRAMES_PER_LATENT = 4

CAMERA_KEYS = (
    "patch_embedding_wancamctrl.weight", "patch_embedding_wancamctrl.bias",
    "c2ws_hidden_states_layer1.weight", "c2ws_hidden_states_layer1.bias",
    "c2ws_hidden_states_layer2.weight", "c2ws_hidden_states_layer2.bias",
    "blocks.*.cam_injector_layer1.weight", "blocks.*.cam_injector_layer1.bias",
    "blocks.*.cam_injector_layer2.weight", "blocks.*.cam_injector_layer2.bias",
    "blocks.*.cam_scale_layer.weight", "blocks.*.cam_scale_layer.bias",
    "blocks.*.cam_shift_layer.weight", "blocks.*.cam_shift_layer.bias",
)  # fmt: skip
"""What these networks have beside Wan2.2-I2V-A14B, whose checkpoints therefore load too."""

# Of Wan, which LingBot-World is trained from; it has a longer one of its own, which stands in its repository.
NEGATIVE_PROMPT = (
    "色调艳丽，过曝，静态，细节模糊不清，字幕，风格，作品，画作，画面，静止，整体发灰，最差质量，低质量，JPEG压缩残留，"
    "丑陋的，残缺的，多余的手指，画得不好的手部，画得不好的脸部，畸形的，毁容的，形态畸形的肢体，手指融合，静止不动的画面，"
    "杂乱的背景，三条腿，背景人很多，倒着走"
)


@dataclass(frozen=True, kw_only=True)
class LingBotNetworkConfig(WanNetworkConfig):
    """Wan2.2-I2V-A14B with camera layers in every block."""

    _target: ClassVar[str] = "lingbot._network:LingBotNetwork"
    dim: int = 5120
    ffn_dim: int = 13824
    num_heads: int = 40
    num_layers: int = 40
    in_dim: int = 36
    control_channels: int = 6
    """Numbers per pixel: origin and direction of its ray; or 7, its direction and whether W, A, S, D are held."""
    keep_injections: bool = True
    """Make what each block adds of the camera once per chunk, and keep it: two times tokens x dim numbers per block.
    Else it is made in every pass, of features that all blocks share."""

    def validate(self) -> None:
        super().validate()
        if self.control_channels < 1:
            raise ConfigError(f"control_channels is {self.control_channels}; expected 6 (camera) or 7 (action)")


@dataclass(frozen=True, kw_only=True)
class CameraEncoderConfig(EncoderConfig):
    """Poses, or keys that drive a camera, as rays of each pixel; has no weights."""

    _target: ClassVar[str] = "lingbot._encoder:CameraEncoder"
    takes_keys: bool = False
    """Whether the model is told of held keys, in place of where rays begin."""
    chunk_frames: int = FRAMES_PER_LATENT
    """Pixel frames of a chunk: a file's path that differs from the run by less is spread over it."""
    world_scale: float = 1.0
    """Length, in the units of poses that a program gives, of the longest step between latent frames. A file is brought
    to it when it is read, and keys move by steps of it."""
    move: float = 1.0
    """Steps that a key moves the camera from one latent frame to the next; the models know up to 1."""
    turn: float = 4.0
    """Degrees that a key turns it, likewise."""
    intrinsics: tuple[float, float, float, float] = (500.0, 500.0, 416.0, 240.0)
    """fx, fy, cx, cy in pixels of a picture of 480x832, where nothing else is said: 80 degrees from left to right."""

    @property
    def takes(self) -> ControlSpec:
        return ControlSpec(keys=KEYS, pose=True)

    def parse_controls(self, source: str, frames: int) -> Sequence[Control | None]:
        """As every model does, and the name of a trajectory, or a file or folder of poses."""
        if source in TRAJECTORIES:
            return [Control(keys=Keys(*TRAJECTORIES[source]))] * frames
        from lingbot._paths import controls_of, is_path, read_path

        if is_path(source):
            return controls_of(read_path(source), frames, self.chunk_frames, self.world_scale)
        return super().parse_controls(source, frames)

    def validate(self) -> None:
        if not self.world_scale > 0:
            raise ConfigError(f"world_scale is {self.world_scale}; expected a length above 0")
        if min(self.intrinsics[:2]) <= 0:
            raise ConfigError(f"intrinsics are {self.intrinsics}; expected focal lengths above 0 (fx, fy, cx, cy)")
        if self.chunk_frames < 1:
            raise ConfigError(f"chunk_frames is {self.chunk_frames}; expected 1 or more")


@dataclass(frozen=True, kw_only=True)
class LingBotRunnerConfig(RunnerConfig):
    """A run whose camera follows a path."""

    trajectory: Trajectory | None = None
    """Move the camera throughout, in place of --control (which also takes a folder or file of poses)."""

    def control_source(self) -> str | None:
        return self.control if self.trajectory is None else self.trajectory

    def validate(self) -> None:
        super().validate()
        if self.trajectory is not None and self.control is not None:
            raise ConfigError("--trajectory and --control both say where the camera goes; give one of them")


# Text encoder and VAE are those of Wan2.1: shared files are downloaded once.
_SHARED = "hf://Wan-AI/Wan2.1-T2V-1.3B/"
_LOW = WanTransformerConfig(
    # Both experts' injections for 81 frames would take 54 GB.
    network=LingBotNetworkConfig(keep_injections=False),
    checkpoint_path="hf://robbyant/lingbot-world-base-cam/low_noise_model",
    allow_missing=CAMERA_KEYS,
    len_t=21,
    concat_image_mask_to_latent=True,
    guidance_scale=5.0,
    cfg="sequential",
    negative_prompt=NEGATIVE_PROMPT,
)
_HIGH = derive_config(_LOW, checkpoint_path="hf://robbyant/lingbot-world-base-cam/high_noise_model")

PIPELINE_LINGBOT_WORLD_CAM = PipelineConfig(
    name="lingbot-world-cam",
    encoder=CameraEncoderConfig(),
    text_encoder=UMT5Config(checkpoint_path=_SHARED + "models_t5_umt5-xxl-enc-bf16.pth"),
    diffusion_model=DiffusionModelConfig(
        transformer=_LOW,
        high_noise=(ExpertConfig(sigma_low=0.947, transformer=_HIGH),),
        swap_experts=True,
        scheduler=UniPCSchedulerConfig(num_steps=70, shift=10.0),
    ),
    decoder=WanVAEConfig(checkpoint_path=_SHARED + "Wan2.1_VAE.pth"),
    image_size="area",
    height=480,
    width=832,
    fps=16.0,
)

PIPELINE_LINGBOT_WORLD_ACT = derive_config(
    PIPELINE_LINGBOT_WORLD_CAM,
    {
        "name": "lingbot-world-act",
        "encoder.takes_keys": True,
        "diffusion_model.transformer": {
            "checkpoint_path": "hf://robbyant/lingbot-world-base-act/low_noise_model",
            "network": {"control_channels": 7},
        },
        "diffusion_model.high_noise.0.transformer": {
            "checkpoint_path": "hf://robbyant/lingbot-world-base-act/high_noise_model",
            "network": {"control_channels": 7},
        },
    },
)

PIPELINE_LINGBOT_WORLD_FAST = derive_config(
    PIPELINE_LINGBOT_WORLD_CAM,
    name="lingbot-world-fast",
    encoder={"chunk_frames": 4 * FRAMES_PER_LATENT},
    diffusion_model={
        "transformer": {
            "network": {"keep_injections": True},
            "checkpoint_path": "hf://robbyant/lingbot-world-v2-14b-causal-fast",
            "len_t": 4,
            "window_size_t": 18,
            "sink_size_t": 6,
            "guidance_scale": 1.0,
            "negative_prompt": "",
        },
        "high_noise": (),
        "swap_experts": False,
        "scheduler": IndexedFewStepSchedulerConfig(num_steps=4, shift=10.0, indices=(0, 250, 500, 750)),
    },
)

# Published with everything visible; a run of 81 frames is all that this window holds.
PIPELINE_LINGBOT_WORLD_FAST_V1 = derive_config(
    PIPELINE_LINGBOT_WORLD_FAST,
    name="lingbot-world-fast-v1",
    encoder={"chunk_frames": 3 * FRAMES_PER_LATENT},
    diffusion_model={
        "transformer": {
            "checkpoint_path": "hf://robbyant/lingbot-world-fast",
            "len_t": 3,
            "window_size_t": 21,
            "sink_size_t": 0,
            "trained_frames": 21,
        },
        "scheduler": {"shift": 5.0, "indices": (0, 179, 358, 679)},
    },
)

_PROMPT = "A first-person walk through an old town in the morning sun, cobbled streets, quiet and detailed"

RUNNER_LINGBOT_WORLD_CAM = LingBotRunnerConfig(
    runner_name="lingbot-world-cam",
    description="LingBot-World 14B, two experts: a world from an image, seen along a camera path (licence: Apache-2.0)",
    prompt=_PROMPT,
    default_num_frames=81,
    pipeline=PIPELINE_LINGBOT_WORLD_CAM,
)

RUNNER_LINGBOT_WORLD_ACT = derive_config(
    RUNNER_LINGBOT_WORLD_CAM,
    runner_name="lingbot-world-act",
    description="LingBot-World 14B, two experts: a world from an image, walked with w a s d (licence: Apache-2.0)",
    pipeline=PIPELINE_LINGBOT_WORLD_ACT,
)

RUNNER_LINGBOT_WORLD_FAST = derive_config(
    RUNNER_LINGBOT_WORLD_CAM,
    runner_name="lingbot-world-fast",
    description="LingBot-World 2 14B causal: a world from an image, streamed under live keys (licence: Apache-2.0)",
    default_num_frames=93,
    pipeline=PIPELINE_LINGBOT_WORLD_FAST,
)

RUNNER_LINGBOT_WORLD_FAST_V1 = derive_config(
    RUNNER_LINGBOT_WORLD_FAST,
    runner_name="lingbot-world-fast-v1",
    description="LingBot-World 14B fast, first version: chunks of three latent frames (licence: Apache-2.0)",
    default_num_frames=81,
    pipeline=PIPELINE_LINGBOT_WORLD_FAST_V1,
)

LINGBOT_CONFIGS = {
    runner.runner_name: runner
    for runner in (
        RUNNER_LINGBOT_WORLD_CAM,
        RUNNER_LINGBOT_WORLD_ACT,
        RUNNER_LINGBOT_WORLD_FAST,
        RUNNER_LINGBOT_WORLD_FAST_V1,
    )
}
