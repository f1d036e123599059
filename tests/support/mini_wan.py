"""The small Wan network whose weights are ``tests/cases/base_mini_wan.safetensors``, and LoRAs for it."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from flashdreams.config import derive_config
from flashdreams.infra.config import RunnerConfig
from flashdreams.recipes.template.config import PIPELINE_TEMPLATE
from flashdreams.recipes.wan.config import WanNetworkConfig, WanTransformerConfig
from flashdreams.recipes.wan.network import WanNetwork

FILE = Path(__file__).parents[1] / "cases" / "base_mini_wan.safetensors"
NETWORK = WanNetworkConfig(
    dim=24, ffn_dim=48, num_heads=2, num_layers=2, in_dim=16, out_dim=16, text_dim=16, text_len=8, freq_dim=16
)
RUNNER = RunnerConfig(
    runner_name="mini-wan",
    description="Two blocks of a Wan DiT",
    pipeline=derive_config(
        PIPELINE_TEMPLATE,
        name="mini-wan",
        diffusion_model=derive_config(
            PIPELINE_TEMPLATE.diffusion_model, transformer=WanTransformerConfig(network=NETWORK, dtype="float32")
        ),
    ),
)
PLUGIN = "mini-wan=mini_wan:RUNNER"


def mini_wan(dtype: torch.dtype = torch.float32) -> WanNetwork:
    network = NETWORK.setup().to(dtype).requires_grad_(False)
    network.load_state_dict(load_file(FILE))
    return network


def factors(seed: int = 0, *, rank: int = 4) -> dict[str, tuple[Tensor, Tensor]]:
    """``{layer: (down, up)}`` for an attention matrix, a text projection and a feed-forward of each block."""
    generator = torch.Generator().manual_seed(seed)
    state, layers = load_file(FILE), {}
    for block in (0, 1):
        for layer in ("self_attn.q", "self_attn.o", "cross_attn.k", "ffn.0"):
            out, inside = state[f"blocks.{block}.{layer}.weight"].shape
            down = torch.randn(rank, inside, generator=generator) / 5
            layers[f"blocks.{block}.{layer}"] = down, torch.randn(out, rank, generator=generator) / 5
    return layers
