"""The Wan network with action modules in its first blocks, and no text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashdreams.core.kv_cache import CacheGeometry
from flashdreams.recipes.wan.network import BlockCache, ChunkContext, NetworkCache, WanBlock, WanNetwork
from matrix_game_2._action import ActionCache, ActionModule, BlockActions, Moment, initialize_cache
from matrix_game_2.config import MatrixGame2NetworkConfig


@dataclass(frozen=True)
class _Told:
    """What one block is told of a pass: its actions, and when they are."""

    actions: BlockActions
    moment: Moment


@dataclass(frozen=True)
class _Pass:
    actions: tuple[BlockActions, ...]
    moment: Moment


class ActionBlock(WanBlock):
    """A Wan block with an action module between cross-attention and feed-forward."""

    def __init__(self, config: MatrixGame2NetworkConfig) -> None:
        super().__init__(config)
        self.config = config
        self.action_model = ActionModule(config)

    def initialize_state(
        self, geometry: CacheGeometry | None, batch: int, dtype: torch.dtype, device: torch.device
    ) -> ActionCache | None:
        return None if geometry is None else initialize_cache(self.config, geometry, batch, dtype, device)

    def after_cross_attention(self, x: Tensor, input: _Told, cache: BlockCache, context: ChunkContext) -> Tensor:
        return self.action_model(x, input.actions, input.moment, cache.state)


class MatrixGame2Network(WanNetwork):
    """``input`` is a dict of ``keys`` ``[B, T, rows, keyboard_dim]`` and, for a model with a mouse, ``mouse``
    ``[B, T, rows, mouse_dim]``: the rows of the pixel frames before each latent frame."""

    config: MatrixGame2NetworkConfig

    def make_block(self, index: int) -> WanBlock:
        return (ActionBlock if index < self.config.action_blocks else WanBlock)(self.config)

    def prepare(self, input: dict[str, Tensor] | None) -> tuple[BlockActions, ...]:
        """Keyboard keys and values of every action module.

        Raises:
            ValueError: there are no actions, or they are of another model.
        """
        config = self.config
        want = {"keys": config.keyboard_dim} | ({"mouse": config.mouse_dim} if config.mouse_dim else {})
        got = {name: value.shape[-1] for name, value in (input or {}).items()}
        if input is None or got != want:
            raise ValueError(f"actions are {got or None}; this network is moved by {want} (names and widths)")
        blocks: list[Any] = list(self.blocks[: config.action_blocks])
        return tuple(block.action_model.prepare(input["keys"], input.get("mouse")) for block in blocks)

    def place(self, context: ChunkContext) -> Moment:
        return Moment.of(context, self.config, context.rope.cos.dtype)

    def pass_input(self, latent: Tensor, context: ChunkContext, cache: NetworkCache, input: Any) -> _Pass:
        return _Pass(input, context.place)

    def block_input(self, index: int, input: _Pass) -> _Told | None:
        return _Told(input.actions[index], input.moment) if index < self.config.action_blocks else None
