"""Modules of :mod:`video_model`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashdreams.core.controls import Control
from flashdreams.infra.decoder import StreamingDecoder
from flashdreams.infra.encoder import StreamingEncoder
from flashdreams.infra.layout import Layout
from flashdreams.infra.postprocess.contract import Postprocessor
from flashdreams.recipes.wan.network import Modulation, WanNetwork


@dataclass
class VideoEncoderCache:
    """A running mean of the groups so far, so that what a latent frame sees depends on all frames before it."""

    mean: Tensor | None = None


class VideoEncoder(StreamingEncoder):
    """Frames, scaled; and for each latent frame k the running mean of pixel frames 4k + 1 .. 4k + 4, one group ahead
    of those that it decodes to."""

    def initialize_cache(self, layout: Layout) -> VideoEncoderCache:
        return VideoEncoderCache()

    def encode(
        self, controls: Sequence[Sequence[Control]], start: int, stop: int, cache: VideoEncoderCache
    ) -> dict[str, Tensor]:
        frames = torch.stack([torch.stack([torch.tensor(c.frame.pixels) for c in row]) for row in controls])
        small = frames.permute(0, 4, 1, 2, 3).float() / 127.5 - 1
        large = F.interpolate(small, scale_factor=(1, self.config.scale, self.config.scale), mode="nearest")
        groups = F.avg_pool3d(large[:, :, -4 * (stop - start) :], (4, 16, 16)).permute(0, 2, 3, 4, 1).flatten(2, 3)
        means = []
        for group in groups.unbind(1):
            cache.mean = group if cache.mean is None else (cache.mean + group) / 2
            means.append(cache.mean)
        return {"tokens": torch.stack(means, 1), "frames": large[:, :, : -self.config.lookahead]}


class VideoNetwork(WanNetwork):
    """Adds what the encoder saw to the tokens of each latent frame."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.seen = nn.Linear(3, config.dim)

    def condition(self, x: Tensor, time: Modulation, input: dict[str, Tensor]) -> tuple[Tensor, Modulation]:
        return x + self.seen(input["tokens"].to(x)).flatten(1, 2), time


@dataclass
class VideoDecoderCache:
    decoded: int = 0


class VideoDecoder(StreamingDecoder):
    """The scaled frames, with a tenth of the latent on top."""

    def initialize_cache(self) -> VideoDecoderCache:
        return VideoDecoderCache()

    def decode(self, latent: Tensor, cache: VideoDecoderCache, input: Any = None) -> Tensor:
        detail = F.interpolate(latent, scale_factor=(4, 8, 8), mode="nearest").clamp(-1, 1)
        detail = detail[:, :, 3:] if cache.decoded == 0 else detail
        cache.decoded += latent.shape[2]
        return 0.9 * input["frames"] + 0.1 * detail


class Repeat(Postprocessor):
    """Its state counts frames."""

    def open(self, height: int, width: int, fps: Fraction, seed: int = 0) -> dict[str, Any]:
        return {"count": 0, "size": self.config.output_size(height, width)}

    def push(self, frames: Tensor, state: dict[str, Any]) -> Tensor:
        state["count"] += len(frames)
        if self.config.fail_at is not None and state["count"] > self.config.fail_at:
            raise RuntimeError("the post-processor is broken")
        return frames.repeat_interleave(self.config.scale, 1).repeat_interleave(self.config.scale, 2)

    def finish(self, state: dict[str, Any]) -> Tensor:
        return torch.empty(0, *state["size"], 3, dtype=torch.uint8)
