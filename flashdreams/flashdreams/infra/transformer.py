"""Contract of autoregressive transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from flashdreams.core.kv_cache import RollingKVCache
from flashdreams.infra.config import TransformerConfig
from flashdreams.infra.layout import Layout
from flashdreams.infra.loading import CheckpointModule


class Transformer(CheckpointModule):
    """Predicts the flow of a chunk given the committed ones.

    The law: ``predict_flow`` never changes committed context, so repeating it gives the same answer; only ``commit``
    does, and it moves ``cache.start`` past the chunk. Everything of one rollout lives in the cache.
    """

    conditions_type: Any
    """Frozen dataclass of named condition slots, with ``to_dict`` and ``from_dict``."""

    can_recommit: ClassVar[bool] = True
    """Whether :meth:`recommit` works, so that latents and controls of the chunks in the window are worth keeping."""

    kv_cache: Callable[..., RollingKVCache] = RollingKVCache
    """What makes the rolling cache of a self-attention layer; acceleration may set another one on an instance."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config

    @property
    def latent_channels(self) -> int:
        """Channels of the latents this model makes."""
        raise NotImplementedError(type(self).__name__)

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """The repeated part of the network, in the order it runs. Acceleration treats it block by block."""
        return ()

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

    def skip(self, frames: int, cache: Any) -> None:
        """Move on as if ``frames`` latent frames had been committed; what the context holds of them is undefined. For
        measuring and planning a later chunk without making those before it."""
        raise NotImplementedError(f"{type(self).__name__} cannot skip frames")

    def recommit(self, chunks: Mapping[int, tuple[Tensor, Any]], timestep: Tensor, cache: Any) -> None:
        """Make the context anew from ``chunks``, latent and input by first frame, under the present conditions and
        weights: those of the committed chunks that are still in the window."""
        raise NotImplementedError(type(self).__name__)

    def stamp(self, noisy: Tensor, cache: Any) -> Tensor:
        """Put what is known into a sample: called on the noise and after every step."""
        return noisy

    def postprocess_clean_latent(self, clean: Tensor, cache: Any, input: Any = None) -> Tensor:
        """Last word on a finished chunk before it is decoded and committed."""
        return clean
