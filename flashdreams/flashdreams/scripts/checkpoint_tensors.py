"""The actions of ``flashdreams checkpoint`` that read weights, one tensor at a time: equal, convert, merge-lora."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashdreams.core.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from flashdreams.core.checkpoint.choose import choose_transform
from flashdreams.core.checkpoint.keymap import KeyMap, Strip
from flashdreams.core.checkpoint.lora import Lora, merged, read_lora
from flashdreams.core.checkpoint.plan import Step, plan_steps
from flashdreams.core.checkpoint.write import Entry, parse_size, write_checkpoint
from flashdreams.core.notices import say_once
from flashdreams.infra.errors import UserError
from flashdreams.infra.lora_flag import parse_loras
from flashdreams.scripts.checkpoint_models import Part, model_part

_WORST = 5
_DTYPES = ("float32", "bfloat16", "float16", "float64")
Read = Callable[[Step], Tensor]


def equal(options: Any) -> int:
    """Exit code 1 if a tensor differs by more than the tolerance, or stands in one of the two only."""
    part = model_part(options.model, options.part, options.transform) if options.model else None
    sides = [_opened(source, part, options.transform) for source in (options.a, options.b)]
    (steps_a, read_a), (steps_b, read_b) = sides
    by_key = {step.target: step for step in steps_b}
    lacking = [step.target for step in steps_a if step.target not in by_key]
    lacking += [key for key in by_key if key not in {step.target for step in steps_a}]
    distances = {
        step.target: _distance(read_a(step), read_b(by_key[step.target])) for step in steps_a if step.target in by_key
    }
    differing = {key: d for key, d in distances.items() if not d <= options.tolerance}
    for key, distance in sorted(differing.items(), key=lambda item: -item[1])[:_WORST]:
        print(f"  {key}: max |d| = {distance:.3g}")
    for key in lacking[:_WORST]:
        print(f"  {key} stands in one of the two only")
    total = len(distances) + len(lacking)
    worst = max(distances.values(), default=0.0)
    print(f"equal: {len(distances) - len(differing)}/{total} tensors, max |d| = {worst:.3g}")
    return int(bool(differing or lacking))


def _distance(a: Tensor, b: Tensor) -> float:
    """Largest difference of two tensors; infinite where shapes differ, or one alone is not a number."""
    if a.shape != b.shape:
        return float("inf")
    if not a.numel():
        return 0.0
    wide = (a.double() - b.double()).abs()
    wide[(a == b) | (a.isnan() & b.isnan())] = 0.0
    return wide.nan_to_num(nan=float("inf"), posinf=float("inf")).max().item()


def convert(options: Any) -> int:
    """Write SOURCE anew."""
    if options.dtype not in (None, *_DTYPES):
        raise UserError(f"--dtype is {options.dtype!r}; expected {', '.join(_DTYPES)}")
    if options.to and not options.model:
        raise UserError("--to names a layout of a model; say which model with --model SLUG")
    part = model_part(options.model, options.part, options.transform) if options.model else None
    checkpoint = open_checkpoint(options.source)
    key_map = _conversion(part, options.to, checkpoint) if part is not None and options.to else None
    steps, read = _steps(checkpoint, key_map, part if key_map is None else None, options.transform)
    dtype = getattr(torch, options.dtype) if options.dtype else None
    return _write(checkpoint, steps, read, options, dtype)


def _conversion(part: Part, to: str, checkpoint: Checkpoint) -> KeyMap:
    """From the checkpoint's layout, found from its header, to the layout ``to``."""
    wanted = part.wanted
    known = {"native": KeyMap((Strip.before(wanted),))}
    for name, key_map in part.layouts.items():
        known[name] = KeyMap((Strip.before(key_map.inverse().shapes(wanted)),)).then(key_map)
    layouts = list(known)
    known |= {name: key_map for name, key_map in part.candidates.items() if isinstance(key_map, KeyMap)}
    if to not in layouts:
        raise UserError(f"--to is {to!r}; {part.name} has the layouts {', '.join(layouts)}")
    header = checkpoint.meta()
    name, _, match = choose_transform(wanted, header, known, allow_missing=part.config.allow_missing)
    if not match.ok:
        lines = "\n  ".join(match.lines())
        raise CheckpointError(f"{checkpoint.source} has no known layout of {part.name}: {match.summary}\n  {lines}")
    say_once(f"{checkpoint.source} has the {name} layout")
    if to == "native":
        return known[name]
    back = part.layouts[to].inverse()
    back.plan(wanted)  # proves, key for key, that it leads to where the map comes from
    return known[name].then(back)


def merge_lora(options: Any) -> int:
    """Write BASE with the LoRAs in it; nothing is written unless all of them fit."""
    part = model_part(options.model, options.part, None) if options.model else None
    checkpoint = open_checkpoint(options.source)
    header = checkpoint.meta()
    maps = [each for key_map in (part.layouts if part else {}).values() for each in (key_map, key_map.inverse())]
    loras: list[tuple[float, Lora]] = []
    for choice in parse_loras(options.loras):
        lora = read_lora(choice.source, header, maps)
        print(f"{choice.source}: {lora.summary}, weight {choice.weight:g}")
        loras.append((choice.weight, lora))
    steps, read = _steps(checkpoint, None, None, None)

    def merge(step: Step) -> Tensor:
        value = read(step)
        changes = [(weight, patch) for weight, lora in loras if (patch := lora.patches.get(step.target))]
        return merged(value, changes, value.device) if changes else value

    return _write(checkpoint, steps, merge, options, None)


def _opened(source: str, part: Part | None, transform: str | None) -> tuple[list[Step], Read]:
    return _steps(open_checkpoint(source), None, part, transform)


def _steps(
    checkpoint: Checkpoint, key_map: KeyMap | None, part: Part | None, transform: str | None
) -> tuple[list[Step], Read]:
    """The tensors that come of a checkpoint, and how each is read."""
    header = checkpoint.meta()
    if not header:
        raise UserError(f"{checkpoint.source} has no tensors; give a file, folder or repository of weights")
    chosen: Any = key_map
    if part is not None:
        name, steps, match = choose_transform(
            part.wanted, header, part.candidates, allow_missing=part.config.allow_missing
        )
        if not match.ok:
            lines = "\n  ".join(match.lines())
            raise CheckpointError(f"{checkpoint.source} does not fit {part.name}: {match.summary}\n  {lines}")
        chosen = part.candidates[name]
    else:
        if transform is not None:
            raise UserError("--transform needs --model, whose keys it leads to")
        steps = plan_steps(header, key_map)
    checkpoint.fetch()
    made: dict[str, Tensor] = {}

    def read(step: Step) -> Tensor:
        if step.sources:
            stored = [checkpoint.read(key) for key in step.sources]
            return step.operation(*stored) if step.operation else stored[0]
        if not made:
            made.update(chosen({key: checkpoint.lazily(key) for key in checkpoint.where}))
        return made[step.target]

    return steps, read


def _write(checkpoint: Checkpoint, steps: list[Step], read: Read, options: Any, dtype: torch.dtype | None) -> int:
    output = Path(options.output)
    if output.suffix != ".safetensors":
        raise UserError(f"--output is {options.output!r}; expected a name that ends in .safetensors")
    if any(file.resolve() == output.resolve() for file in checkpoint.files):
        raise UserError(f"--output {options.output} is the checkpoint itself; give another name")
    try:
        limit = parse_size(options.shard_size) if options.shard_size else None
    except ValueError as error:
        raise UserError(f"--shard-size: {error}") from None

    def make(step: Step) -> Tensor:
        value = read(step)
        return value.to(dtype) if dtype is not None and value.is_floating_point() else value

    entries = []
    for step in steps:
        kind = dtype if dtype is not None and step.meta.is_floating_point() else step.meta.dtype
        entries.append(Entry(step.target, tuple(step.meta.shape), kind, partial(make, step)))
    notes = {name: text for part in checkpoint.parts for name, text in part.metadata.items()}
    files = write_checkpoint(output, entries, notes, limit)
    size = sum(entry.bytes for entry in entries)
    print(f"{', '.join(str(file) for file in files[:3])}{' ...' if len(files) > 3 else ''}: {len(entries)} tensors, "
          f"{size / 1e9:.3g} GB")  # fmt: skip
    return 0
