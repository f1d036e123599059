"""The state of a training on disk: trained tensors, the optimiser's, and what they were made with."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from flashdreams.infra.errors import UserError

FILE = "state.safetensors"


def write_tensors(path: Path, tensors: Mapping[str, Tensor], notes: Mapping[str, str] | None = None) -> None:
    """A safetensors file, in one step: whatever ends the program, ``path`` is the old file or the new one."""
    partial = path.with_name(path.name + ".part")
    whole = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    save_file(whole, partial, metadata=dict(notes or {}))
    os.replace(partial, path)


def save_state(
    folder: Path, trained: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, iteration: int, made_with: Any
) -> None:
    """Write ``folder/state.safetensors``, from which :func:`load_state` goes on.

    Args:
        made_with: plain data that decides the training's numbers.
    """
    tensors = {f"trained.{name}": value for name, value in trained.items()}
    for number, moments in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{number}.{name}": value for name, value in moments.items()}
    notes = {"iteration": str(iteration), "made_with": json.dumps(made_with, sort_keys=True)}
    write_tensors(folder / FILE, tensors, notes)


def load_state(folder: Path, optimizer: torch.optim.Optimizer, made_with: Any) -> tuple[dict[str, Tensor], int]:
    """The trained tensors and the iteration of ``folder``; the optimiser takes its own.

    Raises:
        UserError: there is no state, or it was made with other settings; they are named.
    """
    path = folder / FILE
    if not path.exists():
        raise UserError(f"{folder} holds no training to go on with; leave --resume out to begin one")
    with safe_open(path, framework="pt") as file:
        notes = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    old, new = json.loads(notes["made_with"]), json.loads(json.dumps(made_with))
    if differs := [f"{name} ({old.get(name)}, now {new.get(name)})" for name in new if old.get(name) != new.get(name)]:
        raise UserError(
            f"{folder} was trained with other settings: {', '.join(differs)}; give those, or another folder"
        )
    moments: dict[int, dict[str, Tensor]] = {}
    trained = {}
    for name, value in tensors.items():
        kind, _, rest = name.partition(".")
        if kind == "trained":
            trained[rest] = value
        else:
            number, _, moment = rest.partition(".")
            moments.setdefault(int(number), {})[moment] = value
    optimizer.load_state_dict({"state": moments, "param_groups": optimizer.state_dict()["param_groups"]})
    return trained, int(notes["iteration"])
