"""Random numbers are keyed, not sequenced.

Every draw is a pure function of (seed, sample id, chunk, step, purpose), made on the CPU in float32 at full shape:
the same noise on any device, in any batch, on any number of ranks, in any order of calls.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

MAX_SEED = 2**64 - 1


def check_seed(seed: int) -> int:
    """Return ``seed`` if it is an integer in ``[0, 2**64 - 1]``; raise ValueError otherwise."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= MAX_SEED:
        raise ValueError(f"seed is {seed!r}; expected a whole number from 0 to {MAX_SEED}")
    return seed


def stream_key(seed: int, sample_id: str, chunk: int, step: int, purpose: str) -> int:
    """The 63-bit generator seed of one draw: blake2b over the five parts, as text."""
    text = "\x1f".join((str(seed), sample_id, str(chunk), str(step), purpose))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


class Noise(Protocol):
    """Source of the random tensors of one rollout."""

    def initial(self, chunk: int, start: int, shape: Sequence[int]) -> Tensor:
        """Start noise of ``chunk``, whose first latent frame is ``start``; float32 ``[B, C, T, H, W]`` on the CPU."""
        ...

    def step(self, chunk: int, step: int, start: int, shape: Sequence[int]) -> Tensor:
        """Fresh noise that the transition after denoising step ``step`` adds."""
        ...


@dataclass(frozen=True)
class KeyedNoise:
    """The default source. One stream per (seed, sample id, chunk, step, purpose)."""

    seed: int
    sample_ids: tuple[str, ...] = ("0",)
    component: str = "video"
    group_ids: tuple[str, ...] | None = None
    """Samples of one group share their start noise and differ in that of the steps; ``None``: each has its own."""

    def __post_init__(self) -> None:
        check_seed(self.seed)
        if self.group_ids is not None and len(self.group_ids) != len(self.sample_ids):
            raise ValueError(f"{len(self.group_ids)} group ids were given for {len(self.sample_ids)} sample ids")

    def initial(self, chunk: int, start: int, shape: Sequence[int]) -> Tensor:
        return self._draw(self.group_ids or self.sample_ids, chunk, 0, "initial", shape)

    def step(self, chunk: int, step: int, start: int, shape: Sequence[int]) -> Tensor:
        return self._draw(self.sample_ids, chunk, step, "step", shape)

    def _draw(self, ids: tuple[str, ...], chunk: int, step: int, purpose: str, shape: Sequence[int]) -> Tensor:
        if shape[0] != len(ids):
            raise ValueError(f"noise of batch {shape[0]} was asked for {len(ids)} sample ids")
        purpose = f"{self.component}/{purpose}"
        draws = []
        for sample_id in ids:
            key = stream_key(self.seed, sample_id, chunk, step, purpose)
            generator = torch.Generator(device="cpu").manual_seed(key)
            draws.append(torch.randn(*shape[1:], generator=generator, dtype=torch.float32))
        return torch.stack(draws)


@dataclass(frozen=True)
class GivenNoise:
    """Plays back given tensors: goldens, comparison with other implementations, drivers.

    Args:
        frames: start noise of the whole clip ``[B, C, T, H, W]``.
        steps: fresh noise by ``(chunk, step)``, each ``[B, C, T, H, W]``.
    """

    frames: Tensor
    steps: Mapping[tuple[int, int], Tensor] = field(default_factory=dict)

    def initial(self, chunk: int, start: int, shape: Sequence[int]) -> Tensor:
        stop = start + shape[2]
        if stop > self.frames.shape[2]:
            raise ValueError(f"chunk {chunk} needs noise up to latent frame {stop}; {self.frames.shape[2]} were given")
        return _checked(self.frames[:, :, start:stop], shape, f"initial noise of chunk {chunk}")

    def step(self, chunk: int, step: int, start: int, shape: Sequence[int]) -> Tensor:
        if (chunk, step) not in self.steps:
            raise ValueError(f"no noise was given for chunk {chunk}, step {step}; given: {sorted(self.steps)}")
        return _checked(self.steps[chunk, step], shape, f"noise of chunk {chunk}, step {step}")


def _checked(noise: Tensor, shape: Sequence[int], what: str) -> Tensor:
    if tuple(noise.shape) != tuple(shape):
        raise ValueError(f"{what} has shape {list(noise.shape)}; expected {list(shape)}")
    return noise
