"""Which tensors of a model a LoRA means: its layer names against the model's own, in every layout of the family."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flashdreams.core.checkpoint.errors import CheckpointError
from flashdreams.core.checkpoint.keymap import WRAPPERS, KeyMap, KeyMapError, PlanItem
from flashdreams.core.checkpoint.lora_file import Addition, Difference
from flashdreams.core.checkpoint.report import nearest

Shape = tuple[int, ...]
_BEFORE = {*WRAPPERS, "base_model", "diffusion_model", "transformer", "unet", "dit", "pipe", "generator"}
"""Parts that tools put before a layer's name: the place of the model in their own program."""
_INSIDE = {name for name in WRAPPERS if name.startswith("_")} | {"base_layer"}
_FLAT = re.compile(r"(?:lora_(?:unet|transformer|dit)|lora|lycoris)_+")
"""Before the names of kohya's tools, which have ``_`` for every dot."""


@dataclass
class Patch:
    """What is added to one tensor of the model, at weight 1."""

    item: PlanItem
    shapes: Mapping[str, Shape]
    additions: dict[str, list[Addition]] = field(default_factory=dict)

    def __call__(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """The change, of the tensor's shape. The steps of a key map are linear, so they map changes as weights."""
        return self.item.operation(*(self._of(key, device, dtype) for key in self.item.sources))

    def _of(self, key: str, device: torch.device, dtype: torch.dtype) -> Tensor:
        shape = self.shapes[key]
        total: Tensor | None = None
        for addition in self.additions.get(key, []):
            change = addition.change(shape, device, dtype)
            total = change if total is None else total.add_(change)
        return torch.zeros(shape, device=device, dtype=dtype) if total is None else total


class _Layout:
    """The model's keys under the names of one published layout."""

    def __init__(self, shapes: Mapping[str, Shape], plan: list[PlanItem]) -> None:
        self.shapes = shapes
        self.plan = plan
        self.flat: dict[str, set[str]] = {}
        for key in shapes:
            module, _, leaf = key.rpartition(".")
            self.flat.setdefault(f"{module.replace('.', '_')}.{leaf}", set()).add(key)

    def find(self, addition: Addition, source: str) -> str | None:
        parts = [part for part in addition.base.split(".") if part not in _INSIDE]
        for start in range(len(parts)):
            name = ".".join(parts[start:])
            if f"{name}.{addition.leaf}" in self.shapes:
                return f"{name}.{addition.leaf}"
            if isinstance(addition.change, Difference) and name in self.shapes:
                return name
            if parts[start] not in _BEFORE:
                break
        prefix = _FLAT.match(addition.base)
        found = self.flat.get(f"{addition.base[prefix.end() :]}.{addition.leaf}", set()) if prefix else set()
        if len(found) > 1:
            raise CheckpointError(f"{source}: {addition.base} may be {' or '.join(sorted(found))}; rename it with dots")
        return next(iter(found), None)


def match_lora(
    additions: list[Addition], wanted: Mapping[str, Shape], key_maps: Iterable[KeyMap], source: str
) -> dict[str, Patch]:
    """The change of each tensor of the model that the LoRA touches.

    Args:
        wanted: the model's shapes by key.
        key_maps: from other layouts, in whose names LoRAs are published, to that of ``wanted``.

    Raises:
        CheckpointError: a layer is not the model's, or of another shape: with the number matched, and the nearest keys.
    """
    best: tuple[_Layout, list[str | None]] | None = None
    for layout in _layouts(wanted, key_maps):
        found = [layout.find(addition, source) for addition in additions]
        if best is None or found.count(None) < best[1].count(None):
            best = layout, found
    assert best is not None
    layout, found = best
    matched = f"matched {len(found) - found.count(None)}/{len(found)}"
    lost = [addition for addition, key in zip(additions, found, strict=True) if key is None]
    if lost:
        lines = [_about(addition, layout.shapes) for addition in lost[:5]]
        raise CheckpointError(
            f"{source} does not fit this model: {matched} layers; it is for another model or part of one\n  "
            + "\n  ".join(lines)
        )
    by_key: dict[str, list[Addition]] = {}
    for addition, key in zip(additions, found, strict=True):
        assert key is not None
        if not addition.change.fits(layout.shapes[key]):
            raise CheckpointError(
                f"{source} does not fit this model: {addition.base} changes {list(addition.change.shape)}, but {key} "
                f"is {list(layout.shapes[key])}; it is for a model of another size"
            )
        by_key.setdefault(key, []).append(addition)
    return {
        item.target: Patch(item, layout.shapes, {key: by_key[key] for key in item.sources if key in by_key})
        for item in layout.plan
        if any(key in by_key for key in item.sources)
    }


def _layouts(wanted: Mapping[str, Shape], key_maps: Iterable[KeyMap]) -> Iterable[_Layout]:
    yield _Layout(wanted, KeyMap().plan(wanted))
    for key_map in key_maps:
        try:
            shapes = key_map.inverse().shapes(wanted)
            yield _Layout(shapes, key_map.plan(shapes))
        except KeyMapError:  # this model is none that the map is for
            continue


def _about(addition: Addition, shapes: Mapping[str, Shape]) -> str:
    near = nearest(f"{addition.base}.{addition.leaf}", addition.change.shape, shapes)
    return f"unexpected {addition.base}" + (f"; nearest: {', '.join(near)}" if near else "")
