"""Static configs of Cosmos-Predict2.5 (torch-free)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from flashdreams.config import ConfigError, InstantiateConfig, derive_config
from flashdreams.infra.config import (
    DiffusionModelConfig,
    DType,
    PipelineConfig,
    RunnerConfig,
    TextEncoderConfig,
    TransformerConfig,
)
from flashdreams.infra.scheduler.config import UniPCSchedulerConfig
from flashdreams.recipes.wan.vae_config import WanVAEConfig

if TYPE_CHECKING:
    from cosmos_predict2._network import CosmosNetwork
    from cosmos_predict2._text_encoder import ReasonTextEncoder

FLASHDREAMS_API = 1

NEGATIVE_PROMPT = (
    "The video captures a series of frames showing ugly scenes, static with no motion, motion blur, over-saturation, "
    "shaky footage, low resolution, grainy texture, pixelated images, poorly lit areas, underexposed and overexposed "
    "scenes, poor color balance, washed out colors, choppy sequences, jerky movements, low frame rate, artifacting, "
    "color banding, unnatural transitions, outdated special effects, fake elements, unconvincing visuals, poorly "
    "edited content, jump cuts, visual noise, and flickering. Overall, the video is of poor quality."
)
"""As published."""


@dataclass(frozen=True, kw_only=True)
class CosmosNetworkConfig(InstantiateConfig["CosmosNetwork"]):
    """Sizes of the DiT. Defaults: Cosmos-Predict2.5-2B."""

    _target: ClassVar[str] = "cosmos_predict2._network:CosmosNetwork"
    dim: int = 2048
    num_heads: int = 16
    num_layers: int = 28
    ffn_dim: int = 8192
    in_dim: int = 18
    """Channels of the latent, one that marks given frames, and one that marks padding of the picture."""
    out_dim: int = 16
    text_dim: int = 100352
    """Width of the text embeddings: all layers of the text encoder side by side."""
    text_len: int = 512
    context_dim: int = 1024
    """Width of the text that cross-attention reads."""
    adaln_dim: int = 256
    """Rank of the matrices that turn the timestep into shifts, scales and gates."""
    patch_size: tuple[int, int, int] = (1, 2, 2)
    eps: float = 1e-6
    qk_eps: float = 1e-6
    """Of the norm of queries and keys: as in the original. diffusers 0.42 has 1e-5."""
    rope_theta: float = 10000.0
    rope_extrapolation: tuple[float, float, float] = (1.0, 3.0, 3.0)
    """How far beyond the base the positions reach, of time, rows and columns."""
    timestep_scale: float = 0.001
    """The network sees timesteps of 0 to 1000 times this."""
    attention: str = "sdpa"

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads

    def validate(self) -> None:
        if self.dim % self.num_heads or self.head_dim % 2 or self.head_dim < 18:
            raise ConfigError(
                f"dim={self.dim} with num_heads={self.num_heads}; expected heads of an even width of at least 18"
            )
        if self.patch_size[0] != 1 or self.patch_size[1] != self.patch_size[2]:
            raise ConfigError(f"patch_size is {self.patch_size}; this family has (1, p, p)")
        if self.in_dim != self.out_dim + 2:
            raise ConfigError(f"in_dim is {self.in_dim}; expected out_dim + 2 = {self.out_dim + 2}")
        if min(self.rope_extrapolation) <= 0:
            raise ConfigError(f"rope_extrapolation is {self.rope_extrapolation}; expected numbers above 0")


@dataclass(frozen=True, kw_only=True)
class CosmosTransformerConfig(TransformerConfig):
    """The DiT as a bidirectional transformer: the whole clip is one chunk."""

    _target: ClassVar[str] = "cosmos_predict2._transformer:CosmosTransformer"
    network: CosmosNetworkConfig = CosmosNetworkConfig()
    dtype: DType = "bfloat16"
    transforms: tuple[str, ...] = field(
        default=("cosmos_predict2._keymaps:dit_from_native", "cosmos_predict2._keymaps:dit_from_diffusers"),
        metadata={"names_code": True},
    )
    len_t: int = 24
    stamp_image_latent: bool = True
    max_given_frames: int = 2
    given_timestep: float | None = 0.1
    """Timestep, of 1000, that the network is told for given frames; ``None``: that of the others."""

    @property
    def spatial_patch(self) -> int:
        return self.network.patch_size[1]

    def validate(self) -> None:
        super().validate()
        if not self.bidirectional:
            raise ConfigError(f"window_size_t is {self.window_size_t}; this model makes a clip as one chunk: set None")
        if not self.stamp_image_latent or self.takes_last_image:
            raise ConfigError("given first frames stand in the sample of this model; leave stamp_image_latent set")
        if self.given_timestep is not None and not 0 <= self.given_timestep <= 1000:
            raise ConfigError(f"given_timestep is {self.given_timestep}; expected 0 to 1000, or None")


@dataclass(frozen=True, kw_only=True)
class ReasonConfig(TextEncoderConfig["ReasonTextEncoder"]):
    """The language model of Qwen2.5-VL-7B (Cosmos-Reason1), of which every layer is read; its eyes are left out."""

    _target: ClassVar[str] = "cosmos_predict2._text_encoder:ReasonTextEncoder"
    dtype: DType = "bfloat16"
    transforms: tuple[str, ...] = field(
        default=("cosmos_predict2._keymaps:text_from_transformers",), metadata={"names_code": True}
    )
    residence: Literal["device", "cpu", "transient"] = "transient"
    cache_embeddings: bool = True
    """On disk: 100 MB per prompt, of the 2 GB that all have together."""
    tokenizer: str | None = None
    """``tokenizer.json``, or a folder or repository that holds one; by default it is looked for beside the checkpoint,
    and in the folder ``tokenizer`` beside that."""
    text_len: int = 512
    """Tokens of a prompt with all that is put around it; more are cut off, fewer filled up with padding, which the
    encoder reads like any other token."""
    vocab_size: int = 152064
    dim: int = 3584
    ffn_dim: int = 18944
    num_layers: int = 28
    num_heads: int = 28
    num_kv_heads: int = 4
    rope_theta: float = 1e6
    eps: float = 1e-6

    @property
    def tokenizer_place(self) -> str | None:
        """Where the tokenizer is looked for; ``None`` without weights that it could lie beside."""
        return self.tokenizer or self.checkpoint_path

    def identity(self) -> tuple[str, ...]:
        """The tokenizer's digest, and the versions of what runs it and the model."""
        from cosmos_predict2._tokenizer import identity

        return identity(self.tokenizer_place)

    def validate(self) -> None:
        if self.dim % (2 * self.num_heads) or self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"dim={self.dim}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}; expected an even width "
                "of each head, and as many queries to each key"
            )
        if self.text_len < 1:
            raise ConfigError(f"text_len is {self.text_len}; expected at least 1")
        if self.dtype == "float16":
            raise ConfigError("dtype is 'float16', in which this encoder overflows; use 'bfloat16' or 'float32'")


# The layout of diffusers, which holds every part in a folder of its own. The native files are read too: see README.
_REVISION = "diffusers/base/post-trained"
_2B = "hf://nvidia/Cosmos-Predict2.5-2B/"

PIPELINE_COSMOS_PREDICT2_5_2B = PipelineConfig(
    name="cosmos-predict2.5-2b",
    text_encoder=ReasonConfig(checkpoint_path=f"{_2B}text_encoder@{_REVISION}"),
    diffusion_model=DiffusionModelConfig(
        transformer=CosmosTransformerConfig(
            checkpoint_path=f"{_2B}transformer@{_REVISION}",
            trained_frames=24,
            guidance_scale=8.0,  # published as 7 in the other convention, v_c + g * (v_c - v_u)
            cfg="sequential",  # as published; at these lengths a batch of two gains no time and doubles the activations
            negative_prompt=NEGATIVE_PROMPT,
        ),
        scheduler=UniPCSchedulerConfig(num_steps=35, shift=5.0),
    ),
    # The VAE is that of Wan2.1, which other slugs download too.
    decoder=WanVAEConfig(checkpoint_path="hf://Wan-AI/Wan2.1-T2V-1.3B/Wan2.1_VAE.pth"),
    height=704,
    width=1280,
    fps=16.0,
)

PIPELINE_COSMOS_PREDICT2_5_14B = derive_config(
    PIPELINE_COSMOS_PREDICT2_5_2B,
    name="cosmos-predict2.5-14b",
    diffusion_model={
        "transformer": {
            "checkpoint_path": f"hf://nvidia/Cosmos-Predict2.5-14B/transformer@{_REVISION}",
            "network": CosmosNetworkConfig(dim=5120, num_heads=40, num_layers=36, ffn_dim=20480),
        }
    },
)

RUNNER_COSMOS_PREDICT2_5_2B = RunnerConfig(
    runner_name="cosmos-predict2.5-2b",
    description="Cosmos-Predict2.5 2B: six seconds of a 704p world from text, or an image and text "
    "(licence: NVIDIA Open Model License)",
    prompt="A delivery robot rolls along a wet street at dusk, passers-by step aside, lamps are reflected in puddles",
    default_num_frames=93,
    pipeline=PIPELINE_COSMOS_PREDICT2_5_2B,
)

RUNNER_COSMOS_PREDICT2_5_14B = derive_config(
    RUNNER_COSMOS_PREDICT2_5_2B,
    runner_name="cosmos-predict2.5-14b",
    description="Cosmos-Predict2.5 14B: six seconds of a 704p world from text, or an image and text "
    "(licence: NVIDIA Open Model License)",
    pipeline=PIPELINE_COSMOS_PREDICT2_5_14B,
)

COSMOS_PREDICT2_CONFIGS = {
    runner.runner_name: runner for runner in (RUNNER_COSMOS_PREDICT2_5_2B, RUNNER_COSMOS_PREDICT2_5_14B)
}
