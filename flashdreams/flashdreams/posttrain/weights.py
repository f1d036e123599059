"""What a training changes of a model: LoRAs of its linear layers, or all of its weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from flashdreams.posttrain.config import Method
from flashdreams.posttrain.lora import TrainableLora
from flashdreams.posttrain.state import write_tensors
from flashdreams.rollout.facts import trainer_facts

if TYPE_CHECKING:
    from flashdreams.infra.pipeline import StreamInferencePipeline


class Trained(Protocol):
    """The trained part of a model."""

    parameters: list[nn.Parameter]

    def merge(self) -> None:
        """Make the model that of the present parameters, after each change of them."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """All of it, by name."""
        ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take it back."""
        ...

    def export(self, folder: Path) -> list[Path]:
        """Write what serving reads, one file per expert."""
        ...


class LoraWeights:
    """One LoRA for each expert. The files are for ``--lora``."""

    def __init__(self, roots: list[nn.Module], targets: tuple[str, ...], rank: int, seed: int) -> None:
        self.loras = [TrainableLora(root, targets, rank, seed + i) for i, root in enumerate(roots)]
        self.parameters = [parameter for lora in self.loras for parameter in lora.parameters]

    def merge(self) -> None:
        for lora in self.loras:
            lora.merge()

    def state_dict(self) -> dict[str, Tensor]:
        return {f"{i}.{name}": value for i, lora in enumerate(self.loras) for name, value in lora.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for i, lora in enumerate(self.loras):
            lora.load_state_dict({name: state[f"{i}.{name}"] for name in lora.state_dict()})

    def export(self, folder: Path) -> list[Path]:
        return _export(folder, "lora", [lora.state_dict() for lora in self.loras])


class FullWeights:
    """Every weight of every expert. The files are checkpoints with the network's own keys."""

    def __init__(self, roots: list[nn.Module]) -> None:
        self.roots = roots
        for root in roots:
            root.requires_grad_(True)
        self.parameters = [parameter for root in roots for parameter in root.parameters()]

    def merge(self) -> None:
        """The model's tensors are the parameters."""

    def state_dict(self) -> dict[str, Tensor]:
        return {f"{i}.{name}": value for i, root in enumerate(self.roots) for name, value in root.state_dict().items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for name, value in self.state_dict().items():
            value.copy_(state[name])

    def export(self, folder: Path) -> list[Path]:
        return _export(folder, "weights", [root.state_dict() for root in self.roots])


def trained_weights(
    pipeline: StreamInferencePipeline, method: Method, rank: int, seed: int
) -> LoraWeights | FullWeights:
    """Prepare ``pipeline`` for training: from now on only these weights have gradients."""
    pipeline.requires_grad_(False)
    facts = trainer_facts(pipeline)
    roots = list(facts.trainable_modules.values())
    return FullWeights(roots) if method == "full" else LoraWeights(roots, facts.lora_targets, rank, seed)


def _export(folder: Path, stem: str, states: list[dict[str, Tensor]]) -> list[Path]:
    paths = []
    for i, state in enumerate(states):
        path = folder / (f"{stem}.safetensors" if len(states) == 1 else f"{stem}.{i}.safetensors")
        write_tensors(path, state)
        paths.append(path)
    return paths
