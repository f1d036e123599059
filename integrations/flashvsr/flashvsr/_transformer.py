"""The network as a stream of single passes."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from flashdreams.recipes.wan.transformer import TransformerCache, WanTransformer


class FlashVSRTransformer(WanTransformer):
    """Wan without a commit pass: the context is what the one denoising pass left in the chunk's slots.

    A pass over clean latents would give other keys and values, so that the context cannot be made anew.
    """

    can_recommit: ClassVar[bool] = False

    def commit(self, clean: Tensor, timestep: Tensor, cache: TransformerCache, input: Any = None) -> None:
        """Move on. The keys and values of the chunk are those of its last ``predict_flow``.

        Raises:
            ValueError: there was none.
        """
        if cache.chunk is None:
            raise ValueError(
                "this model keeps of a chunk what its one pass computed, and none ran for this one: it cannot go on "
                "from given latents"
            )
        cache.start += clean.shape[2]
        cache.chunk = cache.prepared = None
