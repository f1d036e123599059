"""Whether a chunk can be a picture at all, asked before it is written."""

from __future__ import annotations

import torch

from flashdreams.infra.errors import UserError
from flashdreams.infra.rollout import Chunk

_CHECK = (
    "check that the checkpoint is this model's (`flashdreams checkpoint verify <slug> SOURCE`, and `equal` with "
    "another copy of it) and its transform the right one"
)


def check_chunk(chunk: Chunk, dtype: str, *, may_be_constant: bool = False) -> None:
    """Stop a run whose chunk holds no numbers, or whose first chunk is one colour.

    Args:
        dtype: number format of the transformer, for the advice.
        may_be_constant: the first chunk shows a given image, whatever that is.

    Raises:
        UserError: with what to check.
    """
    if not torch.isfinite(chunk.host_latent).all():
        raise UserError(
            f"chunk {chunk.index} holds NaN or infinity: the weights do not fit the config, or {dtype} overflows; "
            f"{'try --dtype float32, or ' if dtype != 'float32' else ''}{_CHECK}"
        )
    if chunk.index == 0 and not may_be_constant and (chunk.frames == chunk.frames[..., :1, :1, :1, :]).all():
        raise UserError(f"every pixel of the first chunk is the same, so the weights make no picture: {_CHECK}")
