"""The Wan network that is told where the camera goes."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from flashdreams.recipes.wan.network import BlockCache, ChunkContext, WanBlock, WanNetwork
from lingbot._camera import FOLD
from lingbot.config import LingBotNetworkConfig

Injection = tuple[Tensor, Tensor]
"""Scale and shift of a block's tokens, ``[B, L, dim]`` each."""


class LingBotBlock(WanBlock):
    """Scales and shifts its tokens after self-attention, by what the camera's features say. The two last layers begin
    at zero, with which the block is a plain one."""

    def __init__(self, config: LingBotNetworkConfig) -> None:
        super().__init__(config)
        self.cam_injector_layer1 = nn.Linear(config.dim, config.dim)
        self.cam_injector_layer2 = nn.Linear(config.dim, config.dim)
        self.cam_scale_layer = nn.Linear(config.dim, config.dim)
        self.cam_shift_layer = nn.Linear(config.dim, config.dim)
        for layer in (self.cam_scale_layer, self.cam_shift_layer):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def injection(self, features: Tensor) -> Injection:
        """Of the chunk's camera features ``[B, L, dim]`` alone: neither noise nor time nor text is in it."""
        x = self.cam_injector_layer2(F.silu(self.cam_injector_layer1(features))) + features
        return self.cam_scale_layer(x), self.cam_shift_layer(x)

    def after_self_attention(
        self, x: Tensor, input: Injection | None, cache: BlockCache, context: ChunkContext
    ) -> Tensor:
        if input is None:
            return x
        scale, shift = input
        return (1 + scale) * x + shift


class LingBotNetwork(WanNetwork):
    """Embeds the camera conditioning once per chunk; each block reads the same features. Without a camera it is the
    Wan network."""

    config: LingBotNetworkConfig

    def __init__(self, config: LingBotNetworkConfig) -> None:
        super().__init__(config)
        inputs = config.control_channels * FOLD * FOLD * config.patch_size[1] * config.patch_size[2]
        self.patch_embedding_wancamctrl = nn.Linear(inputs, config.dim)
        self.c2ws_hidden_states_layer1 = nn.Linear(config.dim, config.dim)
        self.c2ws_hidden_states_layer2 = nn.Linear(config.dim, config.dim)

    def make_block(self, index: int) -> LingBotBlock:
        return LingBotBlock(self.config)

    def features(self, control: Tensor) -> Tensor:
        """Camera conditioning ``[B, 64 C, T, h, w]`` -> ``[B, L, dim]``."""
        _, ph, pw = self.config.patch_size
        cells = self.config.control_channels * FOLD * FOLD
        if control.shape[1] != cells:
            raise ValueError(f"camera conditioning has {control.shape[1]} channels; this network takes {cells}")
        control = control.to(self.patch_embedding_wancamctrl.weight.dtype)
        tokens = rearrange(control, "b c t (h p) (w q) -> b (t h w) (c p q)", p=ph, q=pw)
        x = self.patch_embedding_wancamctrl(tokens)
        return x + self.c2ws_hidden_states_layer2(F.silu(self.c2ws_hidden_states_layer1(x)))

    def prepare(self, input: Tensor | None) -> Any:
        if input is None:
            return None
        features = self.features(input)
        return [self._injection(i, features) for i in range(len(self.blocks))] if self._keeps else features

    def block_input(self, index: int, input: Any) -> Injection | None:
        if input is None:
            return None
        return input[index] if self._keeps else self._injection(index, input)

    @property
    def _keeps(self) -> bool:
        return self.config.keep_injections

    def _injection(self, index: int, features: Tensor) -> Injection:
        block: Any = self.blocks[index]
        return block.injection(features)
