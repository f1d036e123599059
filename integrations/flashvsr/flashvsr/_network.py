"""The Wan network that reads selected windows, and adds the low-quality tokens before its first block."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flashdreams.recipes.wan.network import Modulation, WanBlock, WanNetwork
from flashvsr._attention import SparseSelfAttention
from flashvsr._encoder import LowQuality
from flashvsr.config import FlashVSRNetworkConfig


class FlashVSRBlock(WanBlock):
    """A Wan block with block-sparse self-attention."""

    def __init__(self, config: FlashVSRNetworkConfig) -> None:
        super().__init__(config)
        self.self_attn = SparseSelfAttention(config)


class FlashVSRNetwork(WanNetwork):
    """Keys and shapes are those of Wan2.1 1.3B: what is new here has no weights, or has them in the encoder."""

    config: FlashVSRNetworkConfig

    def make_block(self, index: int) -> WanBlock:
        return FlashVSRBlock(self.config)

    def prepare(self, input: LowQuality | None) -> Tensor:
        """The tokens alone: the frames are for the decoder."""
        if input is None:
            raise ValueError("this network makes a video larger; give its frames (input)")
        if input.tokens.shape[-1] != self.config.dim:
            raise ValueError(
                f"the encoder's tokens are {input.tokens.shape[-1]} wide and the network is {self.config.dim}; their "
                "configs' dim must be equal"
            )
        return input.tokens.flatten(1, 2)

    def condition(self, x: Tensor, time: Modulation, input: Any) -> tuple[Tensor, Modulation]:
        return x + input.to(x.dtype), time
