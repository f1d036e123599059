"""The template's own modules: everything else is the runtime's."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashdreams.core.controls import Control
from flashdreams.infra.decoder import VideoCodec
from flashdreams.infra.encoder import StreamingEncoder, TextEncoder
from flashdreams.recipes.template.config import TemplateNetworkConfig, TemplateTextConfig
from flashdreams.recipes.wan.network import Modulation, WanNetwork


class TemplateTextEncoder(TextEncoder):
    """Each word is a fixed random vector, keyed by its text."""

    config: TemplateTextConfig

    def encode(self, prompts: Sequence[str]) -> Tensor:
        """``[B, length, width]``; words beyond ``length`` are dropped."""
        return torch.stack([self._embed(prompt.split()[: self.config.length]) for prompt in prompts])

    def _embed(self, words: list[str]) -> Tensor:
        rows = torch.zeros(self.config.length, self.config.width)
        for row, word in zip(rows, words, strict=False):
            generator = torch.Generator().manual_seed(zlib.crc32(word.lower().encode()))
            row.copy_(torch.randn(self.config.width, generator=generator))
        return rows


class TemplateControl(StreamingEncoder):
    """Brightness in [-1, 1] of each pixel frame -> mean per latent frame."""

    def encode(self, controls: Sequence[Sequence[Control | None]], start: int, stop: int, cache: Any) -> Tensor:
        """``[B, T]``; the first latent frame of a stream has one pixel frame, every other four."""
        rows = torch.tensor([[(control and control.number) or 0.0 for control in row] for row in controls])
        if start == 0:
            rows = torch.cat([rows[:, :1].expand(-1, 3), rows], dim=1)
        return rows.unflatten(1, (stop - start, 4)).mean(-1)


class TemplateNetwork(WanNetwork):
    """Adds the brightness of each frame, through a new zero-initialised head, to that frame's tokens."""

    frame_by_frame: ClassVar[bool] = True

    def __init__(self, config: TemplateNetworkConfig) -> None:
        super().__init__(config)
        self.brightness = nn.Linear(1, config.dim, bias=False)
        nn.init.zeros_(self.brightness.weight)

    def condition(self, x: Tensor, time: Modulation, input: Tensor | None) -> tuple[Tensor, Modulation]:
        if input is None:
            return x, time
        added = self.brightness(input[..., None].to(x))[:, :, None]
        return (x.unflatten(1, (input.shape[1], -1)) + added).flatten(1, 2), time


@dataclass
class TemplateCodecCache:
    """How many latent frames went through each way."""

    encoded: int = 0
    decoded: int = 0


class TemplateCodec(VideoCodec):
    """No weights: a latent is the mean colour of 4 frames x 8 x 8 pixels; a stream's first frame counts 4 times."""

    def initialize_cache(self) -> TemplateCodecCache:
        return TemplateCodecCache()

    def encode(self, video: Tensor, cache: TemplateCodecCache) -> Tensor:
        if cache.encoded == 0:
            video = torch.cat([video[:, :, :1].expand(-1, -1, 3, -1, -1), video], dim=2)
        latent = F.avg_pool3d(video, (4, 8, 8))
        cache.encoded += latent.shape[2]
        return latent

    def decode(self, latent: Tensor, cache: TemplateCodecCache, input: Any = None) -> Tensor:
        video = F.interpolate(latent, scale_factor=(4, 8, 8), mode="nearest").clamp(-1, 1)
        first = cache.decoded == 0
        cache.decoded += latent.shape[2]
        return video[:, :, 3:] if first else video
