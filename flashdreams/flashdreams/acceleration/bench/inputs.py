"""Files of what a rollout is given: text embeddings and every noise tensor. One safetensors file with

- ``text``: embeddings of the prompt ``[1, tokens, text_dim]``, as the text encoder makes them (at most 512 tokens);
- ``noise``: start noise of the whole clip ``[1, channels, chunks * frames_per_chunk, latent_h, latent_w]``;
- ``noise.<chunk>.<step>``: what the transition after denoising step ``step`` of ``chunk`` (both from 0) adds,
  ``[1, channels, frames_per_chunk, latent_h, latent_w]``, for every step but a chunk's last.

All float32, from a standard normal distribution (text: whatever the encoder gives). More chunks than are made may be
there; names that are none of these are refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from flashdreams.core.noise import GivenNoise, KeyedNoise

_STEP = re.compile(r"noise\.(\d+)\.(\d+)")


@dataclass(frozen=True)
class Sizes:
    """Of one rollout: latent shape of a chunk ``[1, C, T, H, W]``, number of chunks and of steps, width of the text."""

    chunk: tuple[int, int, int, int, int]
    chunks: int
    steps: int
    text_dim: int
    text_len: int = 512

    @property
    def clip(self) -> tuple[int, ...]:
        """Latent shape of all chunks together."""
        batch, channels, frames, height, width = self.chunk
        return batch, channels, self.chunks * frames, height, width


@dataclass(frozen=True)
class Inputs:
    """What one rollout is given."""

    text: Tensor
    noise: GivenNoise

    def tensors(self) -> dict[str, Tensor]:
        """As a file holds them."""
        steps = {f"noise.{chunk}.{step}": noise for (chunk, step), noise in self.noise.steps.items()}
        return {"text": self.text, "noise": self.noise.frames, **steps}


def random_inputs(sizes: Sizes, seed: int) -> Inputs:
    """The noise that ``seed`` gives a rollout, and text from the same seed."""
    keyed = KeyedNoise(seed)
    frames = sizes.chunk[2]
    clip = [keyed.initial(chunk, frames * chunk, sizes.chunk) for chunk in range(sizes.chunks)]
    steps = {
        (chunk, step): keyed.step(chunk, step, frames * chunk, sizes.chunk)
        for chunk in range(sizes.chunks)
        for step in range(sizes.steps - 1)
    }
    text = torch.randn(1, sizes.text_len, sizes.text_dim, generator=torch.Generator().manual_seed(seed % 2**63))
    return Inputs(text, GivenNoise(torch.cat(clip, dim=2), steps))


def write_inputs(inputs: Inputs, path: Path) -> None:
    """Write ``inputs`` for another implementation to read."""
    save_file({name: tensor.contiguous() for name, tensor in inputs.tensors().items()}, path)


def read_inputs(path: Path, sizes: Sizes) -> Inputs:
    """The inputs in ``path``, which fit ``sizes``.

    Raises:
        ValueError: it cannot be read, or a tensor is missing, unknown or of another shape.
    """
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read as safetensors: {error}") from None
    unknown = sorted(name for name in tensors if name not in ("text", "noise") and not _STEP.fullmatch(name))
    if unknown:
        raise ValueError(f"{path} holds {', '.join(unknown[:3])}; expected text, noise and noise.<chunk>.<step>")
    needed = ["text", "noise", *(f"noise.{c}.{s}" for c in range(sizes.chunks) for s in range(sizes.steps - 1))]
    if missing := [name for name in needed if name not in tensors]:
        raise ValueError(
            f"{path} lacks {', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''}; "
            f"{sizes.chunks} chunks of {sizes.steps} steps need {len(needed)} tensors"
        )
    tensors = {name: tensor.float() for name, tensor in tensors.items()}
    _check(path, tensors, sizes)
    steps = {
        (int(match[1]), int(match[2])): tensors[name]
        for name in tensors
        if (match := _STEP.fullmatch(name)) is not None
    }
    return Inputs(tensors["text"], GivenNoise(tensors["noise"], steps))


def _check(path: Path, tensors: Mapping[str, Tensor], sizes: Sizes) -> None:
    text = tensors["text"]
    if text.ndim != 3 or text.shape[0] != 1 or text.shape[1] > sizes.text_len or text.shape[2] != sizes.text_dim:
        expected = f"[1, up to {sizes.text_len}, {sizes.text_dim}]"
        raise ValueError(f"text in {path} is {list(text.shape)}; expected {expected}")
    clip, noise = sizes.clip, tensors["noise"]
    if noise.ndim != 5 or noise.shape[:2] != clip[:2] or noise.shape[3:] != clip[3:] or noise.shape[2] < clip[2]:
        raise ValueError(f"noise in {path} is {list(noise.shape)}; expected {list(clip)}, or more frames")
    for chunk in range(sizes.chunks):
        for step in range(sizes.steps - 1):
            shape = tuple(tensors[f"noise.{chunk}.{step}"].shape)
            if shape != sizes.chunk:
                raise ValueError(f"noise.{chunk}.{step} in {path} is {list(shape)}; expected {list(sizes.chunk)}")
