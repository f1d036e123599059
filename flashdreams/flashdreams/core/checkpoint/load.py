"""Strict loading of one safetensors file into a module that may stand on the meta device."""

from __future__ import annotations

import difflib
import hashlib
import importlib.resources
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

StateDict = Mapping[str, Tensor]


class CheckpointError(ValueError):
    """The file cannot be read, or does not fit the module. The message says how, and what to do."""


@dataclass(frozen=True)
class LoadReport:
    """What was loaded: the file, the sha256 of its bytes, and the keys it lacked by permission."""

    path: Path
    digest: str
    tensors: int
    missing: tuple[str, ...] = ()


def resolve_path(source: str) -> Path:
    """The local file that ``source`` names: a path, or ``package://<package>/<file>`` inside an installed package."""
    scheme = "package://"
    if not source.startswith(scheme):
        return Path(source).expanduser()
    package, _, name = source.removeprefix(scheme).partition("/")
    return Path(str(importlib.resources.files(package).joinpath(name)))


@contextmanager
def open_checkpoint(path: Path) -> Iterator[Any]:
    """The open safetensors file.

    Raises:
        CheckpointError: the file is absent, empty, truncated, or not safetensors.
    """
    if not path.is_file():
        raise CheckpointError(f"no checkpoint at {path}; give the path of a .safetensors file")
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} ({path.stat().st_size} bytes) is not a whole safetensors file ({error}); "
            "download it again, or convert it to safetensors"
        ) from None


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file, memory-mapped."""
    with open_checkpoint(path) as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)


def read_header(path: Path) -> dict[str, list[int]]:
    """Shapes by key, from the header alone; the header also proves that the file is whole."""
    with open_checkpoint(path) as file:
        return {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118 (not a mapping)


def load_checkpoint(
    module: nn.Module,
    source: str,
    *,
    transform: Callable[[StateDict], StateDict] | None = None,
    allow_missing: Iterable[str] = (),
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> LoadReport:
    """Load ``source`` into ``module``, every key matched, as ``dtype`` on ``device``.

    Args:
        transform: maps the file's state dict to the module's own keys.
        allow_missing: exact keys the file may lack; they keep their initialisation, or are zero if on meta.
    """
    path = resolve_path(source)
    state: StateDict = read_state_dict(path)
    if transform is not None:
        state = transform(state)
    wanted = module.state_dict()
    problems, absent = _compare(wanted, state, frozenset(allow_missing))
    if problems:
        raise CheckpointError(
            f"{path} does not fit {type(module).__name__} ({len(wanted)} tensors):\n  " + "\n  ".join(problems)
        )
    ready = {key: _cast(value, dtype, device) for key, value in state.items()}
    for key in absent:
        value = torch.zeros(wanted[key].shape) if wanted[key].is_meta else wanted[key]
        ready[key] = _cast(value, dtype, device)
    module.load_state_dict(ready, strict=True, assign=True)
    return LoadReport(path, file_digest(path), len(state), tuple(absent))


def file_digest(path: Path) -> str:
    """``sha256:<hex>`` of the file's bytes."""
    with path.open("rb") as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()


def _cast(value: Tensor, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    return value.to(device, dtype) if value.is_floating_point() else value.to(device)


def _compare(wanted: StateDict, given: StateDict, optional: frozenset[str]) -> tuple[list[str], list[str]]:
    """Problems, in words, and the keys that are absent by permission."""
    missing = sorted(wanted.keys() - given.keys() - optional)
    unexpected = sorted(given.keys() - wanted.keys())
    problems = []
    for key in missing[:5]:
        near = difflib.get_close_matches(key, unexpected, n=3, cutoff=0.3)
        problems.append(f"missing {key} {list(wanted[key].shape)}" + (f"; nearest: {', '.join(near)}" if near else ""))
    problems += [f"unexpected {key} {list(given[key].shape)}" for key in unexpected[:5]]
    shared = sorted(wanted.keys() & given.keys())
    wrong = [key for key in shared if wanted[key].shape != given[key].shape]
    problems += [f"{key} is {list(given[key].shape)}, expected {list(wanted[key].shape)}" for key in wrong[:5]]
    if problems:
        problems.append(f"in all {len(missing)} missing, {len(unexpected)} unexpected, {len(wrong)} of another shape")
    return problems, sorted(optional & (wanted.keys() - given.keys()))
