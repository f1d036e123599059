"""Contract of autoregressive transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from flashdreams.config import ConfigError
from flashdreams.core.kv_cache import RollingKVCache
from flashdreams.infra.config import TransformerConfig
from flashdreams.infra.layout import Layout
from flashdreams.infra.loading import CheckpointModule


@dataclass(frozen=True)
class Copy:
    """A noisy sample ``[B, C, T, H, W]`` of a chunk, at ``timestep`` ``[B]``."""

    chunk: int
    noisy: Tensor
    timestep: Tensor


class Transformer(CheckpointModule):
    """Predicts the flow of a chunk given the committed ones.

    The law: ``predict_flow`` never changes committed context, so repeating it gives the same answer; only ``commit``
    does, and it moves ``cache.start`` past the chunk. Everything of one rollout lives in the cache.
    """

    conditions_type: Any
    """Frozen dataclass of named condition slots, with ``to_dict`` and ``from_dict``."""

    can_recommit: ClassVar[bool] = True
    """Whether :meth:`recommit` works, so that latents and controls of the chunks in the window are worth keeping."""

    lora_targets: ClassVar[tuple[str, ...]] = ()
    """Ends of the names of the linear layers that adapters are made for."""

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

    def check_fused_commit(self) -> None:
        """Refuse a model whose commits :meth:`commit_and_predict_flow` cannot do.

        Raises:
            ConfigError: with what stands in the way.
        """
        raise ConfigError(f"{type(self).__name__} commits no chunk within another pass; set fused_commit to False")

    def can_fuse(self, clean: Tensor, frames: int, cache: Any) -> bool:
        """Whether this chunk and a next one of ``frames`` fit into one pass; others are committed by themselves."""
        raise NotImplementedError(type(self).__name__)

    def commit_and_predict_flow(
        self,
        clean: Tensor,
        noisy: Tensor,
        timesteps: tuple[Tensor, Tensor],
        cache: Any,
        inputs: tuple[Any, Any] = (None, None),
    ) -> Tensor:
        """:meth:`commit` of ``clean``, then :meth:`predict_flow` of ``noisy``, in one pass; equal to the two.

        A failure within leaves a context that no pass can go on from.

        Args:
            timesteps: of the commit and of the prediction, of one shape.
            inputs: the controls of either chunk.
        """
        raise NotImplementedError(type(self).__name__)

    def predict_flow_packed(
        self,
        clean: Sequence[Tensor],
        copies: Sequence[Copy],
        layout: Layout,
        conditions: Any,
        inputs: Sequence[Any],
        *,
        detached: bool,
    ) -> list[Tensor]:
        """:meth:`predict_flow` of many chunks in one pass, each seeing what it would have seen after the commits of
        the clean chunks before it: for training, without a cache.

        Args:
            clean: latents of chunks 0, 1, ... up to the one before the last that is copied.
            inputs: controls of each chunk up to the last that is copied.
            detached: whether the gradient ends at the keys and values of the clean chunks.

        Raises:
            ValueError: one pass could not be equal, with the reason.
        """
        raise ValueError(f"packed: {type(self).__name__} has no such pass; use mode='exact'")

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


def check_plain(module: nn.Module, base: type[nn.Module], *names: str) -> None:
    """Refuse a module that computes something in another way than ``base``, which a fused commit does not know.

    Raises:
        ConfigError: with the first of the methods ``names`` that its class has of its own.
    """
    for name in names:
        if getattr(type(module), name) is not getattr(base, name):
            raise ConfigError(
                f"{type(module).__name__} has a {name} of its own, which cannot be done within another pass; set "
                "fused_commit to False"
            )
