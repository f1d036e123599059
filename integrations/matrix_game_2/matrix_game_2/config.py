"""Static configs of Matrix-Game-2 (torch-free). Values: SkyworkAI/Matrix-Game, Matrix-Game-2/configs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flashdreams.config import ConfigError, InstantiateConfig, derive_config
from flashdreams.core.controls import ControlSpec
from flashdreams.infra.config import DiffusionModelConfig, EncoderConfig, PipelineConfig, RunnerConfig
from flashdreams.infra.scheduler.config import FewStepSchedulerConfig
from flashdreams.recipes.wan.clip_config import CLIPVisionConfig
from flashdreams.recipes.wan.config import WanNetworkConfig, WanTransformerConfig
from flashdreams.recipes.wan.vae_config import WanVAEConfig

FLASHDREAMS_API = 1

FRAMES_PER_LATENT = 4
"""Pixel frames that a latent frame stands for, the first one excepted."""


@dataclass(frozen=True, kw_only=True)
class MatrixGame2NetworkConfig(WanNetworkConfig):
    """A Wan DiT of 1.3B moved by keys and mouse; it reads the tokens of a picture, and no text."""

    _target: ClassVar[str] = "matrix_game_2._network:MatrixGame2Network"
    in_dim: int = 36
    text_dim: int | None = None
    image_dim: int | None = 1280
    action_blocks: int = 15
    """How many blocks, from the first on, have an action module."""
    action_window: int = 3
    """Latent frames whose actions a latent frame is told: those before it."""
    action_dim: int = 1024
    """Width of the action modules' attention."""
    action_heads: int = 16
    action_embed_dim: int = 128
    """Width of one pixel frame's embedded keys."""
    action_rope_dim: int = 8
    """Dimensions of a head that turn with time."""
    action_rope_theta: float = 256.0
    keyboard_dim: int = 4
    """Keys that the model knows."""
    mouse_dim: int = 2
    """Pitch and yaw; 0 for a model without a mouse."""

    @property
    def action_rows(self) -> int:
        """Pixel frames whose actions a latent frame is told."""
        return self.action_window * FRAMES_PER_LATENT

    def validate(self) -> None:
        super().validate()
        if not 0 <= self.action_blocks <= self.num_layers:
            raise ConfigError(f"action_blocks is {self.action_blocks}; expected 0 to num_layers={self.num_layers}")
        if self.action_dim % (2 * self.action_heads):
            raise ConfigError(f"action_dim={self.action_dim} must be an even multiple of {self.action_heads} heads")
        head_dim = self.action_dim // self.action_heads
        if self.action_rope_dim % 2 or not 0 <= self.action_rope_dim <= head_dim:
            raise ConfigError(f"action_rope_dim is {self.action_rope_dim}; expected an even number up to {head_dim}")
        if self.action_window < 1 or self.keyboard_dim < 1 or self.mouse_dim not in (0, 2):
            raise ConfigError(
                f"action_window={self.action_window}, keyboard_dim={self.keyboard_dim}, mouse_dim={self.mouse_dim}; "
                "expected at least 1, at least 1, and 0 or 2"
            )


@dataclass(frozen=True, kw_only=True)
class ActionConfig(InstantiateConfig):
    """One thing a person can do: the words and keys for it, and what the model is told."""

    words: tuple[str, ...]
    """The first says what it is; the rest are other words and keys of a keyboard."""
    key: int | None = None
    """Column of the keyboard that is 1 while it is done."""
    mouse: tuple[float, float] = (0.0, 0.0)
    """Pitch and yaw, per pixel frame."""


@dataclass(frozen=True, kw_only=True)
class ActionEncoderConfig(EncoderConfig):
    """Held keys and mouse movement to the rows that the action modules read; has no weights."""

    _target: ClassVar[str] = "matrix_game_2._encoder:ActionEncoder"
    actions: tuple[ActionConfig, ...] = ()
    keyboard_dim: int = 4
    """As the network's."""
    mouse_dim: int = 2
    """As the network's."""
    window: int = 3
    """As the network's ``action_window``."""
    one_at_a_time: bool = False
    """Exactly one key is told at a time: of several the latest, and key 0 where none is held."""
    fastest: float = 0.1
    """Mouse motion per pixel frame that the model knows."""

    @property
    def takes(self) -> ControlSpec:
        """Words like ``w+look-left``, and mouse motion: pitch is up, yaw is to the right."""
        keys = {word: action.words[0] for action in self.actions for word in action.words}
        return ControlSpec(keys=keys, mouse=(self.fastest, self.fastest) if self.mouse_dim else None)

    def validate(self) -> None:
        names = [word for action in self.actions for word in action.words]
        if len(set(names)) != len(names) or not all(action.words for action in self.actions):
            raise ConfigError(f"the words of the actions are {names}; expected at least one each, and each word once")
        for action in self.actions:
            if action.key is not None and not 0 <= action.key < self.keyboard_dim:
                raise ConfigError(f"action {action.words[0]!r} is key {action.key}; this model has {self.keyboard_dim}")
            if any(action.mouse) and not self.mouse_dim:
                raise ConfigError(f"action {action.words[0]!r} moves the mouse, which this model does not have")


_CLIP = "hf://Wan-AI/Wan2.1-I2V-14B-480P/models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth"
_VAE = "hf://Wan-AI/Wan2.1-T2V-1.3B/Wan2.1_VAE.pth"

WALK_AND_LOOK = (
    ActionConfig(words=("forward", "w", "up"), key=0),
    ActionConfig(words=("back", "s", "down", "backward"), key=1),
    ActionConfig(words=("left", "a"), key=2),
    ActionConfig(words=("right", "d"), key=3),
    ActionConfig(words=("look-up", "i"), mouse=(0.1, 0.0)),
    ActionConfig(words=("look-down", "k"), mouse=(-0.1, 0.0)),
    ActionConfig(words=("look-left", "j", "turn-left"), mouse=(0.0, -0.1)),
    ActionConfig(words=("look-right", "l", "turn-right"), mouse=(0.0, 0.1)),
)
DRIVE = (
    ActionConfig(words=("forward", "w", "up"), key=0),
    ActionConfig(words=("back", "s", "down", "backward"), key=1),
    ActionConfig(words=("left", "a", "turn-left", "look-left"), mouse=(0.0, -0.1)),
    ActionConfig(words=("right", "d", "turn-right", "look-right"), mouse=(0.0, 0.1)),
)
RUN = (
    ActionConfig(words=("run",), key=0),
    ActionConfig(words=("jump", "w", "up"), key=1),
    ActionConfig(words=("slide", "s", "down"), key=2),
    ActionConfig(words=("turn-left", "z"), key=3),
    ActionConfig(words=("turn-right", "c"), key=4),
    ActionConfig(words=("left", "a"), key=5),
    ActionConfig(words=("right", "d"), key=6),
)

PIPELINE_MATRIX_GAME_2_UNIVERSAL = PipelineConfig(
    name="matrix-game-2-universal",
    encoder=ActionEncoderConfig(actions=WALK_AND_LOOK),
    image_encoder=CLIPVisionConfig(checkpoint_path=_CLIP),
    diffusion_model=DiffusionModelConfig(
        transformer=WanTransformerConfig(
            network=MatrixGame2NetworkConfig(),
            checkpoint_path="hf://Skywork/Matrix-Game-2.0/base_distilled_model/base_distill.safetensors",
            transforms=("flashdreams.recipes.wan.keymaps:dit_from_native",),
            len_t=3,
            window_size_t=6,
            concat_image_mask_to_latent=True,
        ),
        scheduler=FewStepSchedulerConfig(num_steps=3, denoising_steps=(1000, 666, 333), shift=5.0, warp=True),
    ),
    decoder=WanVAEConfig(checkpoint_path=_VAE),
    height=352,
    width=640,
    fps=12.0,
)

PIPELINE_MATRIX_GAME_2_GTA_DRIVE = derive_config(
    PIPELINE_MATRIX_GAME_2_UNIVERSAL,
    name="matrix-game-2-gta-drive",
    encoder=ActionEncoderConfig(actions=DRIVE, keyboard_dim=2),
    diffusion_model={
        "transformer": {
            "network": {"keyboard_dim": 2},
            "checkpoint_path": "hf://Skywork/Matrix-Game-2.0/gta_distilled_model/gta_keyboard2dim.safetensors",
            "window_size_t": 4,
        }
    },
)

PIPELINE_MATRIX_GAME_2_TEMPLERUN = derive_config(
    PIPELINE_MATRIX_GAME_2_UNIVERSAL,
    name="matrix-game-2-templerun",
    encoder=ActionEncoderConfig(actions=RUN, keyboard_dim=7, mouse_dim=0, one_at_a_time=True),
    diffusion_model={
        "transformer": {
            "network": {"keyboard_dim": 7, "mouse_dim": 0},
            "checkpoint_path": (
                "hf://Skywork/Matrix-Game-2.0/templerun_distilled_model/templerun_7dim_onlykey.safetensors"
            ),
        },
        "scheduler": {"num_steps": 4, "denoising_steps": (1000, 750, 500, 250)},
    },
)

# What the three were made from, with action modules in every block: a base to fine-tune, here as a stream with their
# window. No sampler for it is published as a preset, so that it has no slug.
TRANSFORMER_MATRIX_GAME_2_FOUNDATION = derive_config(
    PIPELINE_MATRIX_GAME_2_UNIVERSAL.diffusion_model.transformer,
    network={"action_blocks": 30},
    checkpoint_path="hf://Skywork/Matrix-Game-2.0/base_model/diffusion_pytorch_model.safetensors",
)

RUNNER_MATRIX_GAME_2_UNIVERSAL = RunnerConfig(
    runner_name="matrix-game-2-universal",
    description="Matrix-Game-2 1.3B: walk and look around in a picture, by keys and mouse (licence: MIT)",
    default_num_frames=117,
    pipeline=PIPELINE_MATRIX_GAME_2_UNIVERSAL,
)

RUNNER_MATRIX_GAME_2_GTA_DRIVE = derive_config(
    RUNNER_MATRIX_GAME_2_UNIVERSAL,
    runner_name="matrix-game-2-gta-drive",
    description="Matrix-Game-2 1.3B for driving: go, brake and steer through a picture (licence: MIT)",
    pipeline=PIPELINE_MATRIX_GAME_2_GTA_DRIVE,
)

RUNNER_MATRIX_GAME_2_TEMPLERUN = derive_config(
    RUNNER_MATRIX_GAME_2_UNIVERSAL,
    runner_name="matrix-game-2-templerun",
    description="Matrix-Game-2 1.3B for an endless runner: jump, slide and turn, by keys (licence: MIT)",
    pipeline=PIPELINE_MATRIX_GAME_2_TEMPLERUN,
)

MATRIX_GAME_2_CONFIGS = {
    runner.runner_name: runner
    for runner in (
        RUNNER_MATRIX_GAME_2_UNIVERSAL,
        RUNNER_MATRIX_GAME_2_GTA_DRIVE,
        RUNNER_MATRIX_GAME_2_TEMPLERUN,
    )
}
