"""Post-processors one after another."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from flashdreams.infra.postprocess.config import ChainConfig
from flashdreams.infra.postprocess.contract import Postprocessor


@dataclass
class ChainState:
    """The states of its stages, and the size that comes out."""

    stages: list[Any]
    size: tuple[int, int]


class Chain(Postprocessor):
    """What one stage hands out is pushed to the next."""

    config: ChainConfig

    def __init__(self, config: ChainConfig, device: str = "cpu") -> None:
        super().__init__(config, device)
        self.stages: Any = nn.ModuleList(stage.setup(device=device) for stage in config.stages)

    def open(self, height: int, width: int, fps: Fraction, seed: int = 0) -> ChainState:
        states = []
        for stage in self.stages:
            states.append(stage.open(height, width, fps, seed))
            (height, width), fps = stage.config.output_size(height, width), stage.config.output_fps(fps)
        return ChainState(states, (height, width))

    def push(self, frames: Tensor, state: ChainState) -> Tensor:
        return self._push(frames, state, 0)

    def finish(self, state: ChainState) -> Tensor:
        rest = [torch.empty(0, *state.size, 3, dtype=torch.uint8)]
        for i, (stage, own) in enumerate(zip(self.stages, state.stages, strict=True)):
            rest.append(self._push(stage.finish(own), state, i + 1))
        return torch.cat(rest)

    def checkpoint_digests(self) -> dict[str, str | None]:
        return {
            f"{stage.config.name}.{part}": digest
            for stage in self.stages
            for part, digest in stage.checkpoint_digests().items()
        }

    def _push(self, frames: Tensor, state: ChainState, first: int) -> Tensor:
        for stage, own in zip(self.stages[first:], state.stages[first:], strict=True):
            frames = stage.push(frames, own)
        return frames
