"""Configs of the Wan family (torch-free)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from flashdreams.config import ConfigError, InstantiateConfig
from flashdreams.infra.config import DType, TransformerConfig

if TYPE_CHECKING:
    from flashdreams.recipes.wan.network import WanNetwork

DIT_LAYOUTS = tuple(f"flashdreams.recipes.wan.keymaps:dit_from_{name}" for name in ("native", "diffusers", "fastvideo"))
"""Transforms of the layouts in which weights of this family are published."""


@dataclass(frozen=True, kw_only=True)
class WanNetworkConfig(InstantiateConfig["WanNetwork"]):
    """Sizes of a Wan DiT; the field names are those of the published ``config.json``. Defaults: Wan2.1-T2V-1.3B."""

    _target: ClassVar[str] = "flashdreams.recipes.wan.network:WanNetwork"
    dim: int = 1536
    ffn_dim: int = 8960
    num_heads: int = 12
    num_layers: int = 30
    in_dim: int = 16
    out_dim: int = 16
    text_dim: int | None = 4096
    """``None``: the model takes no text, and cross-attention reads the image tokens in its place."""
    text_len: int = 512
    freq_dim: int = 256
    patch_size: tuple[int, int, int] = (1, 2, 2)
    eps: float = 1e-6
    rope_theta: float = 10000.0
    image_dim: int | None = None
    """Width of the image tokens of a CLIP branch (Wan2.1 image-to-video); ``None``: no such branch. Without text they
    are all that cross-attention reads, by its ordinary weights."""
    image_tokens: int = 257
    """Image tokens in all: of one image, or of two (first and last frame)."""
    image_positions: bool = False
    """Whether each image token has a learned position (first and last frame)."""
    attention: str = "sdpa"

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads

    def validate(self) -> None:
        if self.dim % self.num_heads or self.head_dim % 2:
            raise ConfigError(f"dim={self.dim} must be an even multiple of num_heads={self.num_heads}")
        if self.patch_size[0] != 1 or self.patch_size[1] != self.patch_size[2]:
            raise ConfigError(f"patch_size is {self.patch_size}; this family has (1, p, p)")
        if self.image_positions and self.image_dim is None:
            raise ConfigError("image_positions belong to image tokens; set image_dim too")
        if self.text_dim is None and self.image_dim is None:
            raise ConfigError("text_dim and image_dim are both None; cross-attention needs one of them")


@dataclass(frozen=True, kw_only=True)
class WanTransformerConfig(TransformerConfig):
    """A Wan DiT as an autoregressive transformer."""

    _target: ClassVar[str] = "flashdreams.recipes.wan.transformer:WanTransformer"
    network: WanNetworkConfig = WanNetworkConfig()
    dtype: DType = "bfloat16"
    transforms: tuple[str, ...] = field(default=DIT_LAYOUTS, metadata={"names_code": True})
    reuse_controls: bool = True
    """Compute what a chunk's controls alone decide once per chunk, not in every pass. The same numbers, for memory."""

    @property
    def spatial_patch(self) -> int:
        return self.network.patch_size[1]

    @property
    def takes_text(self) -> bool:
        return self.network.text_dim is not None

    def validate(self) -> None:
        super().validate()
        if self.guidance_scale != 1 and not self.takes_text:
            raise ConfigError(
                f"guidance_scale is {self.guidance_scale}, but this model takes no text to guide by; use 1"
            )
