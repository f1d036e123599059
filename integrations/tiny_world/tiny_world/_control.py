"""Held keys as live controls: one control per pixel frame -> action ids per latent."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flashdreams.core.controls import Control
from flashdreams.infra.config import EncoderConfig
from flashdreams.infra.encoder import StreamingEncoder
from tiny_world._network import FRAMES_PER_LATENT, NUM_ACTIONS, START
from tiny_world._words import ACTIONS, KEYS


class ActionEncoder(StreamingEncoder):
    """Actions ``none``, ``left``, ``right``, ``up``, ``down``, or the keys for them, of each frame.

    A shape moves one way at a time: of several held keys the one that was pressed last counts.
    """

    ids: Tensor

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config)
        self.register_buffer("ids", torch.arange(NUM_ACTIONS + 1), persistent=False)

    def encode(self, controls: Sequence[Sequence[Control | None]], start: int, stop: int, cache: None) -> Tensor:
        """Action ids int64 ``[B, stop - start, 4]``; latent 0 holds one frame, which nothing moves."""
        lead = [START] * FRAMES_PER_LATENT if start == 0 < stop else []
        rows = [lead + [ACTIONS.index(action(control)) for control in row][1 if lead else 0 :] for row in controls]
        index = torch.tensor(rows, device=self.ids.device).view(len(rows), stop - start, FRAMES_PER_LATENT)
        return self.ids[index]


def action(control: Control | None) -> str:
    """The action that a frame's control stands for: held keys before a word."""
    if control is None:
        return "none"
    return KEYS[control.keys.held[-1]] if control.keys else control.word or "none"
