"""A whole rollout: every pass of the transformer, and every decoded chunk, beside the bound of the same calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from flashdreams.acceleration.bench.bound import Bound, CallRecorder, work
from flashdreams.acceleration.bench.inputs import Inputs
from flashdreams.acceleration.bench.report import Entry
from flashdreams.acceleration.bench.sampling import Plan, median, waiter
from flashdreams.acceleration.bench.step import relative_difference, uncompiled
from flashdreams.acceleration.compile import Region, compile_modules
from flashdreams.infra.pipeline import StreamInferencePipeline

PARTS = ("dit", "decode")


@dataclass
class Made:
    """What a rollout made, and where its time went, by part and chunk."""

    latents: list[Tensor] = field(default_factory=list)
    frames: list[Tensor] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})
    bound: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})

    def tensors(self) -> dict[str, Tensor]:
        """``latents`` ``[1, C, T, H, W]``, and ``frames`` ``[1, 3, frames, 8H, 8W]`` in [-1, 1] if decoded."""
        parts = {"latents": self.latents, "frames": self.frames}
        return {name: torch.cat(made, 2).float().cpu().contiguous() for name, made in parts.items() if made}


class Race:
    """Runs a rollout of ``pipeline``; after each pass, and out of its time, the bound of that pass.

    ``dit`` is everything from a chunk's noise to its committed latent: passes, scheduler and all; ``decode`` what
    follows to pixels. Every chunk is committed, the last too.
    """

    def __init__(
        self, pipeline: StreamInferencePipeline, inputs: Inputs, chunks: int, clock: Callable[[], float]
    ) -> None:
        self.pipeline, self.inputs, self.chunks, self.clock = pipeline, inputs, chunks, clock
        self.wait = waiter(pipeline.device)
        self.flops = dict.fromkeys(PARTS, 0)
        self._recorder: CallRecorder | None = None
        self._bounds: list[Callable[[], None]] = []
        self._next = 0
        self._away = 0.0
        transformer = pipeline.diffusion_model.transformer
        for name in ("predict_flow", "commit"):
            setattr(transformer, name, self._paired(getattr(transformer, name), "dit"))
        if pipeline.decoder is not None:
            pipeline.decoder.decode = self._paired(pipeline.decoder.decode, "decode")

    def record(self) -> Made:
        """Run once and list what is called."""
        self._recorder, self._calls = CallRecorder(), []
        with self._recorder:
            made = self.run()
        self._recorder, bound = None, Bound()
        self._bounds = [bound.prepare(calls) for calls in self._calls]
        return made

    def run(self) -> Made:
        """One rollout."""
        made, self._next = Made(), 0
        layout_size = self._size()
        cache = self.pipeline.initialize_cache(
            conditions={"text": self.inputs.text}, noise=self.inputs.noise, height=layout_size[0], width=layout_size[1]
        )
        if self._recorder is not None:
            self._recorder.take()  # the text's keys and values are no pass
        for chunk in range(self.chunks):
            spent, least = self._timed(lambda chunk=chunk: self._generate(chunk, cache, made.latents))
            made.seconds["dit"].append(spent)
            made.bound["dit"].append(least)
            if self.pipeline.decoder is not None:
                spent, least = self._timed(lambda: made.frames.append(self._decode(made.latents[-1], cache)))
                made.seconds["decode"].append(spent)
                made.bound["decode"].append(least)
            spent, least = self._timed(lambda chunk=chunk: self.pipeline.finalize(chunk, cache))
            made.seconds["dit"][-1] += spent
            made.bound["dit"][-1] += least
        return made

    def _generate(self, chunk: int, cache: Any, latents: list[Tensor]) -> None:
        with torch.no_grad():
            latents.append(self.pipeline.diffusion_model.generate(chunk, cache))

    def _decode(self, latent: Tensor, cache: Any) -> Tensor:
        return self.pipeline.decode(latent, cache, cache.pending["input"])

    def _size(self) -> tuple[int, int]:
        scale = self.pipeline.decoder.spatial_compression if self.pipeline.decoder else 1
        height, width = self.inputs.noise.frames.shape[-2:]
        return scale * height, scale * width

    def _timed(self, work: Callable[[], Any]) -> tuple[float, float]:
        """Seconds of ``work`` without the bounds in it, and of those."""
        self.wait()
        begun, self._away, self._least = self.clock(), 0.0, 0.0
        work()
        self.wait()
        return self.clock() - begun - self._away, self._least

    def _paired(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            made = function(*args, **kwargs)
            self.wait()
            begun = self.clock()
            if self._recorder is not None:
                calls = self._recorder.take()
                self._calls.append(calls)
                self.flops[part] += work(calls)
            else:
                self._bounds[self._next]()
                self._next += 1
                self.wait()
                self._least += self.clock() - begun
            self._away += self.clock() - begun
            return made

        return run


def measure_rollout(
    pipeline: StreamInferencePipeline,
    inputs: Inputs,
    *,
    chunks: int,
    modes: Sequence[str],
    plan: Plan,
    dump: Path | None = None,
) -> tuple[list[Entry], dict[str, Any]]:
    """Times of a rollout's parts in each of ``modes``. ``dump`` is written from the first mode."""
    race = Race(pipeline, inputs, chunks, plan.clock)
    reference = race.record()
    experts: Any = pipeline.diffusion_model.experts
    blocks = [block for expert in experts for block in expert.blocks]
    regions: list[Region] = compile_modules(blocks) if "compiled" in modes else []
    runs = {"eager": uncompiled(regions, race.run), "compiled": race.run}
    rounds: dict[str, list[Made]] = {mode: [] for mode in modes}
    for number in range(plan.warmup + plan.repeat):
        for mode in modes:
            made = runs[mode]()
            if number >= plan.warmup:
                rounds[mode].append(made)
            if number == 0 and mode == modes[0] and dump is not None:
                save_file(made.tensors(), dump)
            if number + 1 < plan.warmup + plan.repeat:
                made.frames.clear()
    entries, facts = [], {}
    for mode in modes:
        entries += _entries(mode, rounds[mode], race)
        last = rounds[mode][-1].tensors()["latents"]
        facts[f"{mode} against the uncompiled path, largest difference of latents"] = relative_difference(
            last, reference.tensors()["latents"]
        )
    if any(region.broken for region in regions):
        facts["compiled"] = "compiling failed, so that this ran uncompiled"
    return entries, facts


def _entries(mode: str, rounds: list[Made], race: Race) -> list[Entry]:
    entries = []
    for part in PARTS:
        if not rounds[0].seconds[part]:
            continue
        chunks = range(len(rounds[0].seconds[part]))
        seconds, bound = (
            [tuple(getattr(made, name)[part][chunk] for made in rounds) for chunk in chunks]
            for name in ("seconds", "bound")
        )
        ratios = ", ".join(
            f"{median([a / b for a, b in zip(spent, least, strict=True)]):.3f}"
            for spent, least in zip(seconds, bound, strict=True)
        )
        total = [tuple(sum(made) for made in zip(*parts, strict=True)) for parts in (seconds, bound)]
        entries.append(Entry(f"{mode} {part}", *total, race.flops[part], f"over the bound by chunk: {ratios}"))
    return entries
