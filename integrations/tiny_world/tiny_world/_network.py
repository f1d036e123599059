"""The Wan network with per-frame actions and a pooled caption added to its time embedding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from flashdreams.recipes.wan.modulation import Modulation
from flashdreams.recipes.wan.network import ChunkContext, NetworkCache, WanNetwork
from tiny_world.config import TinyWorldNetworkConfig

FRAMES_PER_LATENT = 4
NUM_ACTIONS = 5
START = NUM_ACTIONS
"""Id given to all four frames of latent 0, which holds one still frame."""


@dataclass(frozen=True)
class _Conditions:
    actions: Tensor
    caption: Tensor


class ActionConditioner(nn.Module):
    """Action ids ``[B, T, 4]`` of the frames of each latent -> ``[B, T, dim]``."""

    def __init__(self, dim: int, action_dim: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_ACTIONS + 1, action_dim)
        self.mlp = nn.Sequential(nn.Linear(FRAMES_PER_LATENT * action_dim, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, actions: Tensor) -> Tensor:
        return self.mlp(self.embedding(actions).flatten(-2))


class TinyWorldNetwork(WanNetwork):
    """Adds, at the input, the actions of each frame (to its tokens and its time embedding) and the caption as a whole
    (to every time embedding; cross-attention alone learns the motion words last).

    The caption is the mean of the first block's text values, so a changed prompt needs no state of its own.
    """

    config: TinyWorldNetworkConfig
    frame_by_frame: ClassVar[bool] = True

    def __init__(self, config: TinyWorldNetworkConfig) -> None:
        super().__init__(config)
        self.action = ActionConditioner(config.dim, config.action_dim)
        self.caption = nn.Sequential(nn.Linear(config.dim, config.dim), nn.SiLU(), nn.Linear(config.dim, config.dim))

    def pass_input(
        self, latent: Tensor, context: ChunkContext, cache: NetworkCache, input: Tensor | None
    ) -> _Conditions:
        """``input`` is int64 actions ``[B, T, 4]``, or ``None`` for no key held."""
        if input is None:
            shape = latent.shape[0], latent.shape[2], FRAMES_PER_LATENT
            input = torch.zeros(shape, dtype=torch.long, device=latent.device)
        return _Conditions(input, cache.blocks[0].text_v.flatten(2).mean(dim=1))

    def condition(self, x: Tensor, time: Modulation, input: _Conditions) -> tuple[Tensor, Modulation]:
        action = self.action(input.actions)
        batch, frames = action.shape[:2]
        x = (x.unflatten(1, (frames, -1)) + action[:, :, None]).flatten(1, 2)
        index = time.index.expand(batch, max(frames, time.index.shape[1]))
        added = (action + self.caption(input.caption)[:, None]).repeat_interleave(index.shape[1] // frames, dim=1)
        rows = time.table[index] + added.to(time.table.dtype)
        return x, Modulation(rows.flatten(0, 1), torch.arange(index.numel(), device=x.device).view(index.shape))
