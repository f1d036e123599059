"""Decoding of a stream, chunk by chunk, beside its convolutions alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from flashdreams.acceleration.bench.bound import Bound, CallRecorder, work
from flashdreams.acceleration.bench.report import Entry
from flashdreams.acceleration.bench.sampling import Plan, interleave, waiter
from flashdreams.acceleration.bench.step import MODES, relative_difference, uncompiled
from flashdreams.acceleration.channels_last import channels_last
from flashdreams.acceleration.compile import compile_modules
from flashdreams.infra.config import DecoderConfig


def measure_codec(
    config: DecoderConfig,
    latent: tuple[int, int, int, int],
    *,
    device: str,
    modes: Sequence[str],
    plan: Plan,
    seed: int = 0,
    layouts: Sequence[str] = ("contiguous",),
) -> tuple[list[Entry], dict[str, Any]]:
    """Times of one chunk, of latents ``[C, T, h, w]``, in the midst of a stream, in each of ``modes`` and ``layouts``;
    the bound is that of the first layout."""
    decoders: dict[str, Any] = {layout: config.setup(device=device) for layout in layouts}
    if "channels last" in decoders:
        channels_last(decoders["channels last"])
    draw = torch.randn(1, *latent, generator=torch.Generator().manual_seed(seed))
    chunk = draw.to(device, getattr(torch, config.dtype))
    runs = {(mode, layout): decoder.initialize_cache() for layout, decoder in decoders.items() for mode in MODES}

    def run(mode: str, layout: str) -> torch.Tensor:
        with torch.no_grad():
            return decoders[layout].decode(chunk, runs[mode, layout])

    for each in runs:
        run(*each)
    with CallRecorder() as recorder:
        want = run("eager", layouts[0])
    calls, facts, regions = recorder.take(), {}, []
    if "compiled" in modes:
        regions = compile_modules([part for decoder in decoders.values() for part in decoder.compiled_parts])
        if not regions:
            facts["compiled"] = "this decoder names no parts to compile"
    cases: dict[str, Callable[[], Any]] = {"bound": Bound().prepare(calls)}
    for mode, layout in runs:
        name = mode if layout == layouts[0] else f"{mode}, {layout}"
        case = partial(run, mode, layout)
        cases[name] = uncompiled(regions, case) if mode == "eager" else case
        if mode in modes and name != "eager":
            facts[f"{name} against eager, largest difference"] = relative_difference(cases[name](), want)
    cases = {name: case for name, case in cases.items() if name.partition(",")[0] in ("bound", *modes)}
    times = interleave(cases, plan, waiter(torch.device(device)))
    return [Entry(name, times[name], times["bound"], work(calls)) for name in cases if name != "bound"], facts
