"""Teacher forcing in one pass: clean context frames and many noisy targets in one sequence."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flashdreams.core.rope import rope_3d
from flashdreams.recipes.wan.network import ChunkContext, NetworkCache
from tiny_world._network import TinyWorldNetwork
from tiny_world._text import TinyTextEncoder
from tiny_world.config import TinyTextEncoderConfig, TinyWorldNetworkConfig

GRID = 4
"""Tokens per row and column of a latent frame (8x8 latent, 2x2 patches)."""


class TrainingModel(nn.Module):
    """Network and text encoder, trained together."""

    def __init__(self) -> None:
        super().__init__()
        self.network = TinyWorldNetwork(TinyWorldNetworkConfig(attention="reference"))
        self.text = TinyTextEncoder(TinyTextEncoderConfig())
        nn.init.zeros_(self.network.head.head.weight)
        nn.init.zeros_(self.network.head.head.bias)


@dataclass(frozen=True)
class Packing:
    """Frames of one sequence: ``clean`` context at latents 0..clean-1, then one noisy frame per entry of ``targets``.

    A clean frame sees clean frames up to itself; a target at latent ``p`` sees clean frames before ``p`` and itself.
    """

    clean: int
    targets: tuple[int, ...]

    @property
    def positions(self) -> list[int]:
        return [*range(self.clean), *self.targets]

    def context(self) -> ChunkContext:
        position = torch.tensor(self.positions)
        is_clean = torch.arange(len(position)) < self.clean
        sees = is_clean[None, :] & (position[None, :] < position[:, None])
        sees |= torch.eye(len(position), dtype=torch.bool)
        mask = sees.repeat_interleave(GRID * GRID, 0).repeat_interleave(GRID * GRID, 1)
        additive = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))
        config = TinyWorldNetworkConfig()
        return ChunkContext(rope_3d(position, GRID, GRID, config.head_dim, config.rope_theta), mask=additive)


@dataclass
class Batch:
    """Clips of one packing: latents ``[B, T, 12, 8, 8]``, actions ``[B, T, 4]``, tokens ``[B, 12]``."""

    latents: Tensor
    actions: Tensor
    tokens: Tensor

    def __len__(self) -> int:
        return len(self.latents)


def flow(
    model: TrainingModel,
    packing: Packing,
    context: ChunkContext,
    batch: Batch,
    clean: Tensor,
    noisy: Tensor,
    sigma: Tensor,
) -> Tensor:
    """Predicted flow ``[B, N, 12, 8, 8]`` of the ``N`` targets.

    Args:
        clean: context latents ``[B, packing.clean, 12, 8, 8]`` (told sigma 0, whatever noise they carry).
        noisy: targets ``[B, N, 12, 8, 8]`` at ``sigma`` ``[B, N]``.
    """
    frames = torch.cat([clean, noisy], dim=1).transpose(1, 2)
    timestep = 1000 * torch.cat([torch.zeros(len(batch), packing.clean), sigma], dim=1)
    cache = NetworkCache(model.network.encode_text(model.text(batch.tokens)))
    out = model.network(frames, timestep, context, cache, batch.actions[:, packing.positions])
    return out.transpose(1, 2)[:, packing.clean :]
