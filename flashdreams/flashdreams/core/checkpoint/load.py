"""Streaming, strict loading: names and shapes are matched first, then tensors are read, cast and placed one by one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flashdreams.core.checkpoint.digest import file_state
from flashdreams.core.checkpoint.errors import CheckpointError
from flashdreams.core.checkpoint.opened import Checkpoint, open_checkpoint
from flashdreams.core.checkpoint.plan import Planner, Step, Transform, plan_steps
from flashdreams.core.checkpoint.report import LoadReport, Match, compare
from flashdreams.core.checkpoint.room import check_room
from flashdreams.core.checkpoint.sources import RandomSource, ZeroSource, parse_source
from flashdreams.core.checkpoint.synthetic import random_tensor
from flashdreams.core.checkpoint.values import check_finite
from flashdreams.core.notices import say_once


def load_checkpoint(
    module: nn.Module,
    source: str,
    *,
    transform: Transform | Planner | None = None,
    allow_missing: Iterable[str] = (),
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> LoadReport:
    """Load ``source`` into ``module``, every key matched, floating-point tensors as ``dtype``, all on ``device``.

    The module should stand on the meta device (see :func:`meta.parameters_on_meta`): then the peak memory is that of
    the model and its largest tensor. Tensors that need no change and stay on the CPU are the pages of the file
    themselves. On any error the module is as it was before. A ``transform`` that is a key map works tensor by tensor; a
    plain function that computes new tensors makes all of those at once.

    Args:
        source: see :func:`sources.parse_source`.
        transform: maps the file's state dict to the module's own keys; it is tried on meta tensors first.
        allow_missing: keys the file may lack (``*``: a layer's number); they keep their initialisation, or are zero if
            on meta.

    Raises:
        CheckpointError: it cannot be read, does not fit, or holds what no weights can be; the message says what to do.
    """
    device = torch.device(device)
    wanted = module.state_dict()
    parsed = parse_source(source)
    if isinstance(parsed, RandomSource):
        check_room(_bytes(wanted.values(), dtype), device, source)
        drawn = {}
        for key, value in wanted.items():
            drawn[key] = random_tensor(key, value.shape, _cast_to(value, dtype), parsed.seed).to(device)
        module.load_state_dict(drawn, strict=True, assign=True)
        return LoadReport(source, (), len(drawn))
    if isinstance(parsed, ZeroSource):
        shared: dict[Any, Tensor] = {}
        for value in wanted.values():
            kind = value.shape, _cast_to(value, dtype)
            shared.setdefault(kind, torch.zeros(value.shape, dtype=kind[1], device=device))
        zeros = {key: shared[value.shape, _cast_to(value, dtype)].detach() for key, value in wanted.items()}
        module.load_state_dict(zeros, strict=True, assign=True)
        return LoadReport(source, (), len(zeros))
    checkpoint = open_checkpoint(source)
    steps = plan_steps(checkpoint.meta(), transform)
    match = compare(wanted, {step.target: step.meta for step in steps}, allow_missing, dtype)
    if not match.ok:
        raise CheckpointError(_misfit(source, type(module).__name__, match))
    copied = [step.meta for step in steps if device.type != "cpu" or _cast_to(step.meta, dtype) != step.meta.dtype]
    check_room(_bytes(copied, dtype), device, source)
    checkpoint.fetch()
    states = tuple(map(file_state, checkpoint.files))
    for notice in checkpoint.notices:
        say_once(notice)
    if match.allowed:
        few = ", ".join(match.allowed[:3]) + (", ..." if len(match.allowed) > 3 else "")
        say_once(f"{source} lacks {len(match.allowed)} keys, as the model's config allows: {few}")
    ready: dict[str, Tensor] = {}
    try:
        function = None if isinstance(transform, Planner) else transform
        _read(checkpoint, steps, function, dtype, device, ready)
        for key in match.allowed:
            value = torch.zeros(wanted[key].shape) if wanted[key].is_meta else wanted[key]
            ready[key] = value.to(device, _cast_to(wanted[key], dtype))
        module.load_state_dict(ready, strict=True, assign=True)
    except BaseException:
        ready.clear()  # the traceback holds this frame; the memory must not wait for it
        raise
    return LoadReport(source, tuple(checkpoint.files), len(steps), match.allowed, tuple(checkpoint.notices), states)


def match_checkpoint(
    module: nn.Module,
    source: str | Path,
    *,
    transform: Transform | Planner | None = None,
    allow_missing: Iterable[str] = (),
    dtype: torch.dtype = torch.float32,
) -> Match:
    """What :func:`load_checkpoint` would find, from headers alone: no weight is read or downloaded."""
    steps = plan_steps(open_checkpoint(source).meta(), transform)
    return compare(module.state_dict(), {step.target: step.meta for step in steps}, allow_missing, dtype)


def read_header(source: str | Path) -> dict[str, list[int]]:
    """Shapes by key, from headers alone; this also proves that the files are whole."""
    return {key: list(info.shape) for key, info in open_checkpoint(source).tensors.items()}


def _read(
    checkpoint: Checkpoint,
    steps: list[Step],
    function: Transform | None,
    dtype: torch.dtype,
    device: torch.device,
    ready: dict[str, Tensor],
) -> None:
    """Fill ``ready``, one tensor after the other."""
    made: dict[str, Tensor] = {}
    if function is not None and any(not step.sources for step in steps):
        result = function({key: checkpoint.lazily(key) for key in checkpoint.where})
        made = {step.target: result[step.target] for step in steps if not step.sources}
    last = {key: step.target for step in steps for key in step.sources}
    alive: list[bool] = []
    for step in steps:
        stored = [checkpoint.read(key) for key in step.sources]
        value = made.pop(step.target) if not stored else step.operation(*stored) if step.operation else stored[0]
        placed = value.to(device, _cast_to(value, dtype)).contiguous()
        if placed.is_floating_point() and placed.numel():
            alive.append(check_finite(placed, step.target, checkpoint.source, value.dtype))
        ready[step.target] = placed.detach()
        place = placed.untyped_storage().data_ptr()
        copied = all(place != tensor.untyped_storage().data_ptr() for tensor in stored)
        for key in step.sources:
            if copied and last[key] == step.target:
                checkpoint.release(key)
    if alive and not any(alive):
        say_once(f"every weight of {checkpoint.source} is zero; the result will be empty: is it the right state dict?")


def _cast_to(value: Tensor, dtype: torch.dtype) -> torch.dtype:
    return dtype if value.is_floating_point() else value.dtype


def _bytes(tensors: Iterable[Tensor], dtype: torch.dtype) -> int:
    return sum(tensor.numel() * _cast_to(tensor, dtype).itemsize for tensor in tensors)


def _misfit(source: str, name: str, match: Match) -> str:
    head = f"{source} does not fit {name}: {match.summary}"
    if match.formats:
        head += (
            "; quantized weights need the scales they were made with, and this config asks for none: take the "
            "checkpoint in bf16, fp16 or fp32"
        )
    return head + "\n  " + "\n  ".join(match.lines())
