"""Config of the TAEHV family of tiny video codecs (torch-free)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from flashdreams.config import ConfigError
from flashdreams.infra.config import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class TAEHVConfig(DecoderConfig):
    """Layout of one checkpoint. Defaults: ``taew2_1``, for the latents of the Wan2.1 VAE.

    ``taew2_2`` (Wan2.2-TI2V-5B) has 48 channels and patch 2, ``taehv1_5`` 32 channels and patch 2; files named
    ``*_super`` have the ``super`` layout.
    """

    _target: ClassVar[str] = "flashdreams.recipes.taehv.taehv:TAEHV"
    latent_channels: int = 16
    patch_size: int = 1
    """Pixels, in height and width, that are stacked as channels before the first layer and after the last."""
    layout: Literal["base", "super"] = "base"
    """Layers of the decoder; the encoder is the same in both."""
    encoder_time: tuple[int, int, int] = (2, 2, 1)
    """How many frames become one at each level, from pixels to latents."""
    decoder_time: tuple[int, int, int] = (1, 2, 2)
    """How many frames one becomes at each level, from latents to pixels."""
    latents_per_pass: int = 4
    """Latents that go through the layers together; more is faster and takes more memory."""
    transforms: tuple[str, ...] = field(
        default=("flashdreams.recipes.taehv.taehv:keep_last_rows",), metadata={"names_code": True}
    )

    @property
    def spatial_compression(self) -> int:  # ty: ignore[incompatible-property-override]
        return 8 * self.patch_size

    @property
    def temporal_compression(self) -> int:  # ty: ignore[incompatible-property-override]
        return math.prod(self.decoder_time)

    def validate(self) -> None:
        if min(self.latent_channels, self.patch_size, self.latents_per_pass) < 1:
            raise ConfigError(
                f"latent_channels={self.latent_channels}, patch_size={self.patch_size}, "
                f"latents_per_pass={self.latents_per_pass}; all must be at least 1"
            )
        for name in ("encoder_time", "decoder_time"):
            factors = getattr(self, name)
            if len(factors) != 3 or min(factors) < 1:
                raise ConfigError(f"{name} is {factors}; expected one factor of at least 1 for each of the 3 levels")
        if math.prod(self.encoder_time) != self.temporal_compression:
            raise ConfigError(
                f"encoder_time={self.encoder_time} makes one latent of {math.prod(self.encoder_time)} frames, "
                f"decoder_time={self.decoder_time} {self.temporal_compression} frames of one; they must be equal"
            )
