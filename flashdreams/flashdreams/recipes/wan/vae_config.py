"""Config of the causal video VAE of Wan2.1 (torch-free)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flashdreams.config import ConfigError
from flashdreams.infra.config import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class WanVAEConfig(DecoderConfig):
    """Sizes of a Wan2.1 VAE; the defaults are the published ``Wan2.1_VAE.pth``."""

    _target: ClassVar[str] = "flashdreams.recipes.wan.vae:WanVAE"
    dim: int = 96
    z_dim: int = 16
    dim_mult: tuple[int, ...] = (1, 2, 4, 4)
    """Width of each level, in multiples of ``dim``, from pixels to latents."""
    num_res_blocks: int = 2
    """Residual blocks per level of the encoder; the decoder has one more."""
    temporal_downsample: tuple[bool, ...] = (False, True, True)
    """Whether the step from each level to the next halves time as well as space."""
    latents_mean: tuple[float, ...] = (
        *(-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508),
        *(0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921),
    )
    latents_std: tuple[float, ...] = (
        *(2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743),
        *(3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160),
    )

    def validate(self) -> None:
        if not self.dim_mult or min(self.dim, self.z_dim, self.num_res_blocks, *self.dim_mult) < 1:
            raise ConfigError(
                f"dim={self.dim}, z_dim={self.z_dim}, num_res_blocks={self.num_res_blocks}, "
                f"dim_mult={self.dim_mult}; all must be at least 1"
            )
        if len(self.temporal_downsample) != len(self.dim_mult) - 1:
            raise ConfigError(
                f"temporal_downsample has {len(self.temporal_downsample)} entries; {len(self.dim_mult)} levels "
                f"(dim_mult) have {len(self.dim_mult) - 1} steps between them"
            )
        compression = 2 ** sum(self.temporal_downsample), 2 ** len(self.temporal_downsample)
        if compression != (self.temporal_compression, self.spatial_compression):
            raise ConfigError(
                f"temporal_downsample={self.temporal_downsample} compresses {compression[0]}x in time and "
                f"{compression[1]}x in space; expected {self.temporal_compression}x and {self.spatial_compression}x"
            )
        odd = [self.dim * multiple for multiple in self.dim_mult[1:] if self.dim * multiple % 2]
        if odd:
            raise ConfigError(f"a level is {odd[0]} channels wide; the decoder halves it, so it must be even")
        for name in ("latents_mean", "latents_std"):
            if len(getattr(self, name)) != self.z_dim:
                raise ConfigError(f"{name} has {len(getattr(self, name))} entries; expected z_dim={self.z_dim}")
        if min(self.latents_std) <= 0:
            raise ConfigError(f"latents_std holds {min(self.latents_std)}; every standard deviation must be positive")
