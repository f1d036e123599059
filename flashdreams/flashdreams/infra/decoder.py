"""Contract of streaming decoders (latent to pixels) and codecs (both ways)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from flashdreams.infra.config import DecoderConfig
from flashdreams.infra.loading import CheckpointModule


class StreamingDecoder(CheckpointModule):
    """Latents to pixels, chunk by chunk; the promise: chunked decode equals whole decode."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.spatial_compression = config.spatial_compression
        self.temporal_compression = config.temporal_compression

    @property
    def compiled_parts(self) -> Sequence[nn.Module]:
        """What a compiler may take: modules that see only a few shapes in a stream, and whose graph has no breaks."""
        return ()

    def initialize_cache(self) -> Any:
        """State of one stream: a tree of dataclasses, dicts, lists, tensors and plain values."""
        raise NotImplementedError(type(self).__name__)

    def decode(self, latent: Tensor, cache: Any, input: Any = None) -> Tensor:
        """Normalised latent ``[B, C, T, h, w]`` -> video ``[B, 3, frames, H, W]`` in [-1, 1].

        Args:
            input: the chunk's controls, from the streaming encoder, for decoders that are conditioned on them.
        """
        raise NotImplementedError(type(self).__name__)


class VideoCodec(StreamingDecoder):
    """A decoder whose module also encodes."""

    def encode(self, video: Tensor, cache: Any) -> Tensor:
        """Video ``[B, 3, F, H, W]`` in [-1, 1] -> normalised latent ``[B, C, T, h, w]``.

        A stream starts with ``1 + 4n`` frames and goes on with multiples of 4 (for a temporal compression of 4).
        """
        raise NotImplementedError(type(self).__name__)
