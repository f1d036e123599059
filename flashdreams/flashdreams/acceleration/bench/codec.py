"""Decoding of a stream, chunk by chunk, beside its convolutions alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flashdreams.acceleration.bench.bound import Bound, CallRecorder, work
from flashdreams.acceleration.bench.report import Entry
from flashdreams.acceleration.bench.sampling import Plan, interleave, waiter
from flashdreams.acceleration.bench.step import relative_difference, uncompiled
from flashdreams.acceleration.compile import compile_modules
from flashdreams.infra.config import DecoderConfig
from flashdreams.infra.decoder import StreamingDecoder


def measure_codec(
    config: DecoderConfig,
    latent: tuple[int, int, int, int],
    *,
    device: str,
    modes: Sequence[str],
    plan: Plan,
    seed: int = 0,
) -> tuple[list[Entry], dict[str, Any]]:
    """Times of one chunk, of latents ``[C, T, h, w]``, in the midst of a stream, in each of ``modes``."""
    decoder: StreamingDecoder = config.setup(device=device)
    draw = torch.randn(1, *latent, generator=torch.Generator().manual_seed(seed))
    chunk = draw.to(device, getattr(torch, config.dtype))
    caches = {mode: decoder.initialize_cache() for mode in ("eager", *modes)}
    with torch.no_grad():
        for cache in caches.values():
            decoder.decode(chunk, cache)
        with CallRecorder() as recorder:
            want = decoder.decode(chunk, caches["eager"])
    calls, facts = recorder.take(), {}

    def run(mode: str) -> torch.Tensor:
        with torch.no_grad():
            return decoder.decode(chunk, caches[mode])

    cases = {"bound": Bound().prepare(calls), "eager": lambda: run("eager"), "compiled": lambda: run("compiled")}
    if "compiled" in modes:
        regions = compile_modules(decoder.compiled_parts)
        cases["eager"] = uncompiled(regions, cases["eager"])
        facts["compiled against eager, largest difference"] = relative_difference(cases["compiled"](), want)
        if not regions:
            facts["compiled"] = "this decoder names no parts to compile"
    cases = {name: case for name, case in cases.items() if name in ("bound", *modes)}
    times = interleave(cases, plan, waiter(torch.device(device)))
    return [Entry(mode, times[mode], times["bound"], work(calls)) for mode in modes], facts
