"""Config of the CLIP image encoder (torch-free)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from flashdreams.config import ConfigError
from flashdreams.infra.config import DType, EncoderConfig

if TYPE_CHECKING:
    from flashdreams.recipes.wan.clip import CLIPImageEncoder  # noqa: F401 (named in quotes below)


@dataclass(frozen=True, kw_only=True)
class CLIPVisionConfig(EncoderConfig["CLIPImageEncoder"]):
    """Sizes of a CLIP vision tower; the defaults are ViT-H/14, as in Wan2.1's image-to-video models."""

    _target: ClassVar[str] = "flashdreams.recipes.wan.clip:CLIPImageEncoder"
    dtype: DType = "float16"
    image_size: int = 224
    patch_size: int = 14
    dim: int = 1280
    mlp_ratio: int = 4
    out_dim: int = 1024
    num_heads: int = 16
    num_layers: int = 32
    norm_eps: float = 1e-5
    transforms: tuple[str, ...] = field(
        default=(
            "flashdreams.recipes.wan.keymaps:CLIP_VISUAL",
            "flashdreams.recipes.wan.keymaps:clip_from_transformers",
        ),
        metadata={"names_code": True},
    )
    allow_missing: tuple[str, ...] = ("visual.head",)
    """The projection to CLIP's joint space, which is not used; files of ``CLIPVisionModel`` do without."""

    @property
    def num_tokens(self) -> int:
        """Of one image: the class token and the patches."""
        return 1 + (self.image_size // self.patch_size) ** 2

    def validate(self) -> None:
        if self.image_size % self.patch_size:
            raise ConfigError(f"image_size={self.image_size} must be a multiple of patch_size={self.patch_size}")
        if self.dim % self.num_heads:
            raise ConfigError(f"dim={self.dim} must be a multiple of num_heads={self.num_heads}")
        if self.num_layers < 2:
            raise ConfigError(f"num_layers is {self.num_layers}; the output is that of the last but one, so 2 at least")
