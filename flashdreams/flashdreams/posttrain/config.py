"""What a training is asked for, as data (no torch)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from flashdreams.config import ConfigError, InstantiateConfig

if TYPE_CHECKING:
    from flashdreams.posttrain.reward import Reward

Algorithm = Literal["grpo", "nft"]
Method = Literal["lora", "full"]


@dataclass(frozen=True, kw_only=True)
class RewardConfig(InstantiateConfig["Reward"]):
    """A judge of videos. Entry points of group ``flashdreams.rewards`` name such configs."""

    name: str
    """What ``--reward`` calls it."""
    description: str
    has_prompts: bool = False
    """Whether it brings prompts to train on, and others to be measured on."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training. All but ``iterations``, ``save_every`` and ``eval_every`` decides its numbers."""

    algorithm: Algorithm
    iterations: int = 12
    groups: int = 8
    """Prompts of an iteration."""
    group_size: int = 8
    """Samples of each prompt, which are compared with one another."""
    batch: int = 64
    """Samples that are rolled out, and trained on, at once, in whole groups."""
    num_chunk: int = 2
    first_chunk: int = 1
    """The first chunk that is trained; those before it are a group's common beginning."""
    updates: int = 1
    """Steps of the optimiser on the samples of an iteration."""
    method: Method = "lora"
    rank: int = 8
    lr: float = 1e-3
    max_grad_norm: float = 1.0
    seed: int = 0
    steps: tuple[int, ...] = (0,)
    """GRPO: denoising steps that draw noise and are trained."""
    kernel: str = "cps"
    eta: float = 1.0
    """GRPO: how those steps draw noise, where the model's own sampler draws none."""
    clip: float = 1e-3
    """GRPO: range of the ratio beyond which a sample no longer pulls."""
    sigmas: tuple[float, ...] = (1.0,)
    """NFT: noise levels at which the flow is trained."""
    beta: float = 1.0
    """NFT: how far the positive and the negative flow stand from the old one."""
    eval_samples: int = 64
    eval_chunks: int = 4
    eval_every: int = 0
    """Iterations between measurements; 0 for one before and one after."""
    save_every: int = 1
    videos: int = 2
    """Sample videos of each measurement."""
    prompts: Path | None = None
    """File of training prompts, one per line; the reward's own by default."""
    eval_prompts: Path | None = None

    def validate(self) -> None:
        """Raise :class:`ConfigError` for values that mean nothing."""
        for name, allowed in (("algorithm", Algorithm), ("method", Method)):
            if getattr(self, name) not in get_args(allowed):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; expected {' or '.join(get_args(allowed))}")
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected {least} or more")
        for name in ("lr", "max_grad_norm", "clip", "beta"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected a number above 0")
        if self.first_chunk >= self.num_chunk:
            raise ConfigError(
                f"first_chunk is {self.first_chunk}, and chunks are 0 to {self.num_chunk - 1}: none would be trained"
            )
        if self.batch < self.group_size:
            raise ConfigError(f"batch is {self.batch}, less than a group of {self.group_size}; expected whole groups")
        if not self.sigmas or not all(0 < sigma <= 1 for sigma in self.sigmas):
            raise ConfigError(f"sigmas are {self.sigmas}; expected noise levels above 0, up to 1")
        if not self.steps:
            raise ConfigError("steps are none; name the denoising steps that draw noise, from 0")


_LEAST = {
    "iterations": 0, "groups": 1, "group_size": 2, "batch": 1, "num_chunk": 1, "first_chunk": 0, "updates": 1,
    "rank": 1, "seed": 0, "eval_samples": 0, "eval_chunks": 1, "eval_every": 0, "save_every": 1, "videos": 0,
}  # fmt: skip
