"""Contracts of encoders: one-shot (text, image) and streaming (controls, once per chunk)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from flashdreams.core.controls import Control
from flashdreams.infra.config import EncoderConfig, TextEncoderConfig
from flashdreams.infra.layout import Layout
from flashdreams.infra.loading import CheckpointModule


class TextEncoder(CheckpointModule):
    """Prompts to embeddings, once per prompt. Where it lives is the business of :mod:`flashdreams.infra.prompts`."""

    def __init__(self, config: TextEncoderConfig) -> None:
        super().__init__()
        self.config = config

    def encode(self, prompts: Sequence[str]) -> Tensor:
        """``[B, S, D]`` embeddings of ``B`` prompts; an empty prompt is the unconditional one."""
        raise NotImplementedError(type(self).__name__)


class ImageEncoder(CheckpointModule):
    """Given images to tokens, once per image."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config

    def encode(self, images: Tensor) -> Tensor:
        """``[B, S, D]`` tokens of ``B`` images ``[B, 3, H, W]`` in [-1, 1], of any size."""
        raise NotImplementedError(type(self).__name__)


class StreamingEncoder(CheckpointModule):
    """Live controls to the ``input`` of one chunk's ``predict_flow``."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config

    def initialize_cache(self, layout: Layout) -> Any:
        """State of one stream of this size; ``None`` if there is none."""
        return None

    def encode(self, controls: Sequence[Sequence[Control | None]], start: int, stop: int, cache: Any) -> Any:
        """The chunk's ``input``: a tensor, or a tree of tensors, with the batch on axis 0.

        Args:
            controls: for each sample, one control per pixel frame of the chunk and of the ``config.lookahead`` frames
                after it, as ``config.takes.validate`` returned it; ``None`` is "no control".
            start, stop: latent frames of the chunk.
        """
        raise NotImplementedError(type(self).__name__)
