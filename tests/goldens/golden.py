"""A golden file: what it holds, how near is near enough, and the comparison."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from weights import draw_all

RTOL = 1e-4


@dataclass(frozen=True)
class Golden:
    """Inputs and expected outputs of one case, with everything needed to run it."""

    name: str
    config: dict[str, Any]
    repository: str
    """Public repository and commit that made the numbers."""
    files: tuple[str, ...]
    """Its files that were run."""
    weights: dict[str, dict[str, Tensor]]
    """State dict of each model of the case, by the model's name."""
    measured: dict[str, dict[str, float]]
    """Of each output: ``max_abs``, how far its float32 numbers are from float64 ones, and ``rms_out``, its size."""
    inputs: dict[str, Tensor]
    wants: dict[str, Tensor]

    @property
    def atol(self) -> float:
        """20 times the largest float32 rounding of any output, rounded up to one digit; at least 1e-5. Numbers that are
        given in float64 are compared as such, to 1e-12."""
        if any(want.dtype == torch.float64 for want in self.wants.values()):
            return 1e-12
        roundings = [entry["max_abs"] / self.unit(name) for name, entry in self.measured.items()]
        atol = max(1e-5, 20 * max(roundings, default=0.0))
        digit = 10.0 ** math.floor(math.log10(atol))
        return math.ceil(round(atol / digit, 6)) * digit

    @property
    def rtol(self) -> float:
        """A ten-thousandth, where float32 numbers are compared."""
        return 1e-12 if self.atol == 1e-12 else RTOL

    def unit(self, output: str) -> float:
        """What 1 means in an output: timesteps, which reach 1000, are compared as the noise levels they stand for."""
        return 1000.0 if self.measured.get(output, {}).get("rms_out", 0) > 100 else 1.0


@dataclass(frozen=True)
class Comparison:
    """Largest difference over all outputs; ``problems`` says what is wrong, and is empty if nothing is."""

    difference: float
    problems: tuple[str, ...]


def load(path: Path) -> Golden:
    """Read a golden file.

    Raises:
        ValueError: it is not one.
    """
    try:
        with safe_open(path, "pt") as file:
            metadata = {key: json.loads(value) for key, value in (file.metadata() or {}).items()}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
        source, models = metadata["source"], metadata["weights"]
        repository, files = source.get("repo", ""), source.get("files", source.get("file", ""))
        return Golden(
            name=path.stem,
            config=metadata["config"],
            repository=repository if isinstance(repository, str) else ", ".join(repository),
            files=(files,) if isinstance(files, str) else tuple(files),
            weights={name: draw_all(model["shapes"], model["seed"]) for name, model in models.items()},
            measured=metadata["measured"].get("float32_vs_float64") or {},
            inputs={key[3:]: tensor for key, tensor in tensors.items() if key.startswith("in.")},
            wants={key[4:]: tensor for key, tensor in tensors.items() if key.startswith("out.")},
        )
    except Exception as error:
        raise ValueError(f"{path} is not a readable golden file ({type(error).__name__}: {error})") from error


def compare(golden: Golden, results: Iterable[tuple[str, Tensor]]) -> Comparison:
    """Compare results, several for an output if it was computed in several ways, with the expected outputs."""
    worst, problems, missing = 0.0, [], set(golden.wants)
    for name, got in results:
        missing.discard(name)
        want = golden.wants[name]
        if got.shape != want.shape:
            problems.append(f"{name} has shape {list(got.shape)}, expected {list(want.shape)}")
            continue
        unit = golden.unit(name)
        want, difference = want.double() / unit, (got.double() - want.double()).abs() / unit
        allowed = (golden.atol + golden.rtol * want.abs()) * golden.wants[name].is_floating_point()
        worst = max(worst, difference.max().item())
        if not bool((difference <= allowed).all()):  # "not all within", so that NaN is a failure
            problems.append(f"{name} differs by {difference.max().item():.1e}")
    problems.extend(f"{name} was not computed" for name in sorted(missing))
    return Comparison(worst, tuple(problems))
