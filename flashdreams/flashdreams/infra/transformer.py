"""Contract of autoregressive transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from flashdreams.core.checkpoint.keymap import KeyMap
from flashdreams.infra.config import TransformerConfig
from flashdreams.infra.layout import Layout


class Transformer(nn.Module):
    """Predicts the flow of a chunk given the committed ones.

    The law: ``predict_flow`` never changes committed context, so repeating it gives the same answer; only ``commit``
    does, and it moves ``cache.start`` past the chunk. Everything of one rollout lives in the cache.
    """

    conditions_type: Any
    """Frozen dataclass of named condition slots, with ``to_dict`` and ``from_dict``."""

    layouts: ClassVar[Mapping[str, KeyMap]] = {}
    """Key maps to the module's own names from the other layouts in which its weights and LoRAs are published."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config

    @property
    def latent_channels(self) -> int:
        """Channels of the latents this model makes."""
        raise NotImplementedError(type(self).__name__)

    def initialize_cache(self, layout: Layout, conditions: Any) -> Any:
        """Everything this transformer keeps for one rollout; empty context."""
        raise NotImplementedError(type(self).__name__)

    def set_conditions(self, cache: Any, conditions: Any) -> None:
        """Exchange the conditions (a new prompt); the committed context stays as it is."""
        raise NotImplementedError(type(self).__name__)

    def predict_flow(self, noisy: Tensor, timestep: Tensor, cache: Any, input: Any = None) -> Tensor:
        """Flow ``noise - clean`` of the next chunk.

        Args:
            noisy: latent ``[B, C, T, H, W]`` of the frames from ``cache.start`` on.
            timestep: ``1000 * sigma`` in float32, ``[B]``, ``[B, T]`` or one per token.
            input: the chunk's controls, from the streaming encoder.
        """
        raise NotImplementedError(type(self).__name__)

    def commit(self, clean: Tensor, timestep: Tensor, cache: Any, input: Any = None) -> None:
        """Make the clean chunk part of the context."""
        raise NotImplementedError(type(self).__name__)

    def postprocess_clean_latent(self, clean: Tensor, cache: Any, input: Any = None) -> Tensor:
        """Last word on a finished chunk before it is decoded and committed."""
        return clean
