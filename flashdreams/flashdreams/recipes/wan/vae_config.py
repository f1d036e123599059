"""Configs of the causal video VAEs of Wan2.1 and Wan2.2 (torch-free)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from flashdreams.config import ConfigError
from flashdreams.infra.config import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class WanVAEConfig(DecoderConfig):
    """Sizes of a Wan2.1 VAE; the defaults are the published ``Wan2.1_VAE.pth``."""

    _target: ClassVar[str] = "flashdreams.recipes.wan.vae:WanVAE"
    transforms: tuple[str, ...] = field(
        default=("flashdreams.recipes.wan.keymaps:vae21_from_diffusers",), metadata={"names_code": True}
    )
    patch_size: ClassVar[int] = 1
    """Pixels, in height and width, that are stacked as channels before the first layer and after the last."""
    dim: int = 96
    """Width of the finest level."""
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
        compression = 2 ** sum(self.temporal_downsample), self.patch_size * 2 ** len(self.temporal_downsample)
        if compression != (self.temporal_compression, self.spatial_compression):
            raise ConfigError(
                f"temporal_downsample={self.temporal_downsample} compresses {compression[0]}x in time and "
                f"{compression[1]}x in space; expected {self.temporal_compression}x and {self.spatial_compression}x"
            )
        self._check_widths()
        for name in ("latents_mean", "latents_std"):
            if len(getattr(self, name)) != self.z_dim:
                raise ConfigError(f"{name} has {len(getattr(self, name))} entries; expected z_dim={self.z_dim}")
        if min(self.latents_std) <= 0:
            raise ConfigError(f"latents_std holds {min(self.latents_std)}; every standard deviation must be positive")

    def _check_widths(self) -> None:
        odd = [self.dim * multiple for multiple in self.dim_mult[1:] if self.dim * multiple % 2]
        if odd:
            raise ConfigError(f"a level is {odd[0]} channels wide; the decoder halves it, so it must be even")


@dataclass(frozen=True, kw_only=True)
class WanVAE22Config(WanVAEConfig):
    """Sizes of a Wan2.2 VAE; the defaults are the published ``Wan2.2_VAE.pth`` of TI2V-5B."""

    _target: ClassVar[str] = "flashdreams.recipes.wan.vae22:WanVAE22"
    transforms: tuple[str, ...] = field(
        default=("flashdreams.recipes.wan.keymaps:vae22_from_diffusers",), metadata={"names_code": True}
    )
    spatial_compression: ClassVar[int] = 16
    patch_size: ClassVar[int] = 2
    dim: int = 160
    decoder_dim: int = 256
    """Width of the finest level of the decoder; ``dim`` is that of the encoder."""
    z_dim: int = 48
    latents_mean: tuple[float, ...] = (
        *(-0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557),
        *(-0.1382, 0.0542, 0.2813, 0.0891, 0.157, -0.0098, 0.0375, -0.1825),
        *(-0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502),
        *(-0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.123),
        *(-0.0313, -0.1649, 0.0117, 0.0723, -0.2839, -0.2083, -0.052, 0.3748),
        *(0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667),
    )
    latents_std: tuple[float, ...] = (
        *(0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.499, 0.4818, 0.5013),
        *(0.8158, 1.0344, 0.5894, 1.0901, 0.6885, 0.6165, 0.8454, 0.4978),
        *(0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659),
        *(0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093),
        *(0.5709, 0.6065, 0.6415, 0.4944, 0.5726, 1.2042, 0.5458, 1.6887),
        *(0.3971, 1.06, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744),
    )

    def _check_widths(self) -> None:
        if self.decoder_dim < 1:
            raise ConfigError(f"decoder_dim is {self.decoder_dim}; expected at least 1")
