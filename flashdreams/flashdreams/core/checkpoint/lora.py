"""LoRAs merged into the weights of a module, in place, and taken out again without a trace."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from flashdreams.core.checkpoint import hub
from flashdreams.core.checkpoint.digest import file_digest
from flashdreams.core.checkpoint.errors import CheckpointError
from flashdreams.core.checkpoint.keymap import KeyMap
from flashdreams.core.checkpoint.lora_file import read_additions
from flashdreams.core.checkpoint.lora_match import Patch, match_lora
from flashdreams.core.checkpoint.lora_settings import ADAPTER_CONFIG, LoraSettings, read_settings
from flashdreams.core.checkpoint.opened import Checkpoint, open_checkpoint
from flashdreams.core.checkpoint.sources import HubSource, parse_source
from flashdreams.core.notices import say_once

LoraSource = str | Path | Mapping[str, Tensor]
"""A file, folder or repository (see :func:`sources.parse_source`), or the tensors themselves."""


@dataclass(frozen=True)
class Lora:
    """A LoRA that fits a model: its change of each tensor it touches. ``layers`` is how many the file describes."""

    source: str
    layers: int
    patches: Mapping[str, Patch]
    digest: str | None = None

    @property
    def summary(self) -> str:
        return f"matched {self.layers}/{self.layers} layers"


def read_lora(source: LoraSource, wanted: Mapping[str, Tensor], key_maps: Iterable[KeyMap] = ()) -> Lora:
    """Read a LoRA and match it with the tensors of a model (values are not looked at; they may be on meta).

    Raises:
        CheckpointError: it is no LoRA, or not one for this model; with the keys, and what to do.
    """
    if isinstance(source, Mapping):
        name, digest, additions = "the LoRA", None, read_additions(source, "the LoRA")
    else:
        name = str(source)
        checkpoint = open_checkpoint(source)
        checkpoint.fetch()
        state = {key: checkpoint.read(key) for key in checkpoint.tensors}
        additions = read_additions(state, name, _settings(checkpoint, source))
        digest = file_digest(checkpoint.files[0]) if checkpoint.files else None
    shapes = {key: tuple(value.shape) for key, value in wanted.items()}
    patches = match_lora(additions, shapes, key_maps, name)
    if all(addition.change.is_zero for addition in additions):
        say_once(f"{name} changes nothing: every change in it is zero; is it from before training?")
    return Lora(name, len(additions), patches, digest)


def _settings(checkpoint: Checkpoint, source: str | Path) -> LoraSettings:
    """From beside the file: peft writes alpha nowhere else."""
    parsed = parse_source(source)
    config = checkpoint.files[0].with_name(ADAPTER_CONFIG) if checkpoint.files else None
    content = config.read_bytes() if config is not None and config.is_file() else None
    if content is None and isinstance(parsed, HubSource):
        listing = hub.list_files(parsed.repo, parsed.revision)
        folder = parsed.path if "." not in parsed.path.rpartition("/")[2] else parsed.path.rpartition("/")[0]
        path = f"{folder}/{ADAPTER_CONFIG}".lstrip("/")
        if isinstance(listing, hub.Listing) and path in listing.files:
            content = hub.download(listing, [path])[0].read_bytes()
    notes = {name: text for part in checkpoint.parts for name, text in part.metadata.items()}
    return read_settings(content, notes, str(source))


def merged(base: Tensor, changes: Iterable[tuple[float, Patch]], device: torch.device) -> Tensor:
    """``base`` plus every change times its weight, summed in at least float32, rounded once."""
    total = base.to(device, torch.promote_types(base.dtype, torch.float32), copy=True)
    for weight, patch in changes:
        total.add_(patch(device, total.dtype), alpha=weight)
    return total.to(base.dtype)


class LoraSet:
    """The LoRAs of one module, and with what weight its tensors hold each of them now.

    Weights change in place, so that compiled code and captured graphs go on. The exact values of the tensors a LoRA
    touches are kept on the CPU while it is in force; every state is computed from them, never by undoing another.
    """

    def __init__(self, module: nn.Module, key_maps: Iterable[KeyMap] = ()) -> None:
        self.module = module
        self.key_maps = tuple(key_maps)
        self.loras: dict[str, Lora] = {}
        self._weights: dict[str, float] = {}
        self._base: dict[str, Tensor] = {}

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each LoRA by name; at 0 the module is as if it were not there."""
        return {name: self._weights.get(name, 0.0) for name in self.loras}

    def add(self, name: str, source: LoraSource, weight: float = 1.0) -> Lora:
        """Read a LoRA and bring it in with ``weight``. On any error the module is as it was.

        Raises:
            CheckpointError: it does not fit, or is none.
            ValueError: the name is taken, or the weight is no finite number.
        """
        if name in self.loras:
            raise ValueError(f"there is a LoRA {name!r} already, from {self.loras[name].source}; remove it first")
        check_weights({name: weight}, (name,))
        wanted = self.module.state_dict()
        lora = read_lora(source, wanted, self.key_maps)
        for key in lora.patches:
            form = _form(wanted[key])
            if wanted[key].is_meta or form is not None:
                state = "has no values yet" if wanted[key].is_meta else f"is stored as {form}"
                raise CheckpointError(f"{lora.source} changes {key}, which {state}; merge LoRAs before quantizing")
        self.loras[name] = lora
        self.set_weights({name: weight})
        return lora

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Change the weights of the LoRAs that are named; the others keep theirs."""
        self.use({**self._weights, **weights})

    def remove(self, name: str) -> None:
        """Take a LoRA out and forget it."""
        check_weights({name: 0.0}, self.loras)
        self.set_weights({name: 0.0})
        del self.loras[name]

    def use(self, weights: Mapping[str, float]) -> None:
        """Make these the weights of all LoRAs; one that is not named has none."""
        check_weights(weights, self.loras)
        weights = {name: float(weights[name]) for name in sorted(weights) if weights[name]}
        if weights == self._weights:
            return
        changed = {name for name in self.loras if weights.get(name) != self._weights.get(name)}
        keys = dict.fromkeys(key for name in changed for key in self.loras[name].patches)
        tensors = self.module.state_dict()
        for key in keys:  # all before any is changed: two names may be of one tensor
            if key not in self._base:
                self._base[key] = tensors[key].to("cpu", copy=True)
        try:
            with torch.no_grad():
                for key in keys:
                    self._write(tensors[key], key, weights)
        except BaseException:
            self._restore(tensors)
            raise
        self._weights = weights

    def _write(self, tensor: Tensor, key: str, weights: Mapping[str, float]) -> None:
        base = self._base[key]
        active = [(weight, patch) for name, weight in weights.items() if (patch := self.loras[name].patches.get(key))]
        if active:
            tensor.copy_(merged(base, active, tensor.device))
        else:
            tensor.copy_(base)
            del self._base[key]

    @torch.no_grad()
    def _restore(self, tensors: Mapping[str, Tensor]) -> None:
        for key, base in self._base.items():
            tensors[key].copy_(base)
        self._base, self._weights = {}, {}


def _form(tensor: Tensor) -> object | None:
    """What a weight is stored as that nothing can be added to; ``None`` for ordinary numbers."""
    if type(tensor) not in (Tensor, nn.Parameter):  # a library's quantized weights say that they are floats
        return type(tensor).__name__
    return tensor.dtype if not tensor.is_floating_point() or tensor.dtype.itemsize == 1 else None


def check_weights(weights: Mapping[str, float], names: Iterable[str]) -> None:
    """Refuse weights that are not finite, and names that are not among ``names``."""
    names = list(names)
    for name, weight in weights.items():
        if name not in names:
            raise ValueError(f"there is no LoRA {name!r}; loaded: {', '.join(map(repr, names)) or 'none'}")
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight):
            raise ValueError(f"the weight of LoRA {name!r} is {weight!r}; expected a finite number, such as 0.8")
