"""Held keys and mouse motion of each pixel frame -> what is told to each latent frame."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashdreams.core.controls import Control
from flashdreams.infra.encoder import StreamingEncoder
from flashdreams.infra.layout import Layout
from matrix_game_2.config import FRAMES_PER_LATENT, ActionEncoderConfig


@dataclass
class ActionHistory:
    """The rows ``[B, n, keys + mouse]`` that the next chunk still needs; ``None`` before the first."""

    rows: Tensor | None = None


class ActionEncoder(StreamingEncoder):
    """A latent frame is told the actions of more pixel frames than it stands for: of three latent frames.

    Latent frame ``j`` stands for pixel frames ``4j - 3`` to ``4j`` and is told ``4j - 12`` to ``4j - 1``, as published.
    What lies before the clip is as its first frame.
    """

    config: ActionEncoderConfig
    device_of: Tensor

    def __init__(self, config: ActionEncoderConfig) -> None:
        super().__init__(config)
        self.register_buffer("device_of", torch.zeros(()), persistent=False)
        self.actions = {word: action for action in config.actions for word in action.words}

    def initialize_cache(self, layout: Layout) -> ActionHistory:
        return ActionHistory()

    def encode(
        self, controls: Sequence[Sequence[Control | None]], start: int, stop: int, cache: ActionHistory
    ) -> dict[str, Tensor]:
        """``keys`` ``[B, T, rows, keyboard_dim]`` and, where the model has a mouse, ``mouse`` ``[B, T, rows, 2]``."""
        told = torch.tensor([[self.row(control) for control in sample] for sample in controls])
        if told.shape[1] != FRAMES_PER_LATENT * (stop - start) - (FRAMES_PER_LATENT - 1) * (cache.rows is None):
            raise ValueError(
                f"controls of {told.shape[1]} frames were given for latent frames {start} to {stop - 1}; expected "
                f"{FRAMES_PER_LATENT} for each, and one for the first of all"
            )
        windows = self.windows(told.to(self.device_of), cache)
        keys, mouse = windows.split((self.config.keyboard_dim, self.config.mouse_dim), dim=3)
        return {"keys": keys.contiguous()} | ({"mouse": mouse.contiguous()} if self.config.mouse_dim else {})

    def windows(self, told: Tensor, cache: ActionHistory) -> Tensor:
        """Rows of the chunk's pixel frames ``[B, F, C]`` -> the rows of each latent frame ``[B, T, rows, C]``."""
        size = self.config.window * FRAMES_PER_LATENT
        past = told[:, :1].expand(-1, size, -1) if cache.rows is None else cache.rows
        rows = torch.cat((past, told), dim=1)
        cache.rows = rows[:, rows.shape[1] - (size - FRAMES_PER_LATENT + 1) :].clone()
        return rows.unfold(1, size, FRAMES_PER_LATENT).transpose(2, 3)

    def row(self, control: Control | None) -> list[float]:
        """Keys, pitch and yaw of one pixel frame."""
        config = self.config
        held = [self.actions[name] for name in (control.keys or () if control is not None else ())]
        keys = [action.key for action in held if action.key is not None]
        if config.one_at_a_time:
            keys = keys[-1:] or [0]
        row = [float(column in keys) for column in range(config.keyboard_dim)]
        if not config.mouse_dim:
            return row
        pitch, yaw = (sum(action.mouse[axis] for action in held) for axis in (0, 1))
        if control is not None and control.mouse is not None:  # whose y axis points down
            pitch, yaw = pitch - control.mouse.dy, yaw + control.mouse.dx
        return [*row, pitch, yaw]
