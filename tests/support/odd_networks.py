"""Template networks that remember, replace or leave out what plain ones do: what options for plain ones must know."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from flashdreams.recipes.template.config import PIPELINE_TEMPLATE, TemplateNetworkConfig
from flashdreams.recipes.template.modules import TemplateNetwork
from flashdreams.recipes.wan.attention import SelfAttention
from flashdreams.recipes.wan.network import WanBlock
from flashdreams.recipes.wan.transformer import WanTransformer


class StatefulBlock(WanBlock):
    """Adds the mean of the tokens that it remembers of the window, and scales by its input."""

    def initialize_state(self, geometry, batch, dtype, device) -> Any:
        return torch.zeros(batch, geometry.window * geometry.tokens_per_frame, self.cross_attn.q.in_features)

    def after_self_attention(self, x, input, cache, context) -> Tensor:
        return x if input is None else x * (1 + 0.1 * input.mean(dim=1)[:, None, None])

    def after_cross_attention(self, x, input, cache, context) -> Tensor:
        frames, rows, columns = context.shape
        assert x.shape[1] == frames * rows * columns
        cache.state.index_copy_(1, context.slots, x)
        return x + cache.state[:, : context.visible].mean(dim=1, keepdim=True)


class StatefulNetwork(TemplateNetwork):
    def make_block(self, index: int) -> WanBlock:
        return StatefulBlock(self.config)


class OtherAttention(SelfAttention):
    def forward(self, x, context, cache) -> Tensor:
        return super().forward(x, context, cache)


class OtherNetwork(TemplateNetwork):
    def make_block(self, index: int) -> WanBlock:
        block = WanBlock(self.config)
        block.self_attn = OtherAttention(self.config)
        return block


class LazyTransformer(WanTransformer):
    def commit(self, clean, timestep, cache, input=None) -> None:
        self.skip(clean.shape[2], cache)


@dataclass(frozen=True, kw_only=True)
class StatefulConfig(TemplateNetworkConfig):
    _target: ClassVar[str] = f"{__name__}:StatefulNetwork"


@dataclass(frozen=True, kw_only=True)
class OtherConfig(TemplateNetworkConfig):
    _target: ClassVar[str] = f"{__name__}:OtherNetwork"


def of_template(kind: type[TemplateNetworkConfig]) -> TemplateNetworkConfig:
    """The sizes of the template's network, for one of another class."""
    network: Any = PIPELINE_TEMPLATE.diffusion_model.transformer.network
    return kind(**{field.name: getattr(network, field.name) for field in fields(network)})
