"""Held keys as live controls: one word per pixel frame -> action ids per latent."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flashdreams.infra.config import EncoderConfig
from flashdreams.infra.encoder import StreamingEncoder
from tiny_world._network import FRAMES_PER_LATENT, NUM_ACTIONS, START
from tiny_world._words import ACTIONS, action_name


class ActionEncoder(StreamingEncoder):
    """Actions ``none``, ``left``, ``right``, ``up``, ``down`` (or the keys ``w a s d``) of each frame."""

    ids: Tensor

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config)
        self.register_buffer("ids", torch.arange(NUM_ACTIONS + 1), persistent=False)

    def encode(self, controls: Sequence[Sequence[str | None]], start: int, stop: int, cache: None) -> Tensor:
        """Action ids int64 ``[B, stop - start, 4]``; latent 0 holds one frame, which nothing moves."""
        lead = [START] * FRAMES_PER_LATENT if start == 0 < stop else []
        rows = [lead + [ACTIONS.index(action_name(c)) for c in row][1 if lead else 0 :] for row in controls]
        index = torch.tensor(rows, device=self.ids.device).view(len(rows), stop - start, FRAMES_PER_LATENT)
        return self.ids[index]
