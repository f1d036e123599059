"""What an :class:`AccelerationConfig` asks for, done to a loaded pipeline."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import torch
from torch import nn

from flashdreams.acceleration import cuda_graph, native
from flashdreams.acceleration.approximations import approximations
from flashdreams.acceleration.artifacts import Artifacts, writable_compiler_folder
from flashdreams.acceleration.channels_last import channels_last
from flashdreams.acceleration.compile import Region, compile_modules
from flashdreams.acceleration.cuda_graph import Graphs
from flashdreams.acceleration.kv_dtype import store_kv_as
from flashdreams.acceleration.lane import DecodeLane
from flashdreams.acceleration.offload import offload_blocks
from flashdreams.acceleration.prewarm import prewarm
from flashdreams.acceleration.profile import Profiler
from flashdreams.acceleration.quantize import quantize_blocks
from flashdreams.core.notices import say_once
from flashdreams.infra.acceleration_config import AccelerationConfig
from flashdreams.infra.pipeline import StreamInferencePipeline
from flashdreams.infra.rollout import Rollout


@dataclass
class Acceleration:
    """What was done to one pipeline (``pipeline.acceleration``)."""

    config: AccelerationConfig
    notes: list[str] = field(default_factory=list)
    """What was done, for people and for the run record."""
    approximations: list[str] = field(default_factory=list)
    """Those of ``notes`` that make the result another than the published model's."""
    regions: list[Region] = field(default_factory=list)
    """What is compiled."""
    cuda_graphs: list[Graphs] = field(default_factory=list)
    """One per expert, if passes run from CUDA graphs."""
    profiler: Profiler | None = None
    artifacts: Artifacts | None = None
    """Where compiled code is kept, if it is."""
    kept: Path | None = None
    """The file that was written last; ``None`` while there was nothing new to keep."""

    @property
    def graphs(self) -> int:
        """Compilations so far."""
        return sum(region.graphs for region in self.regions)

    @property
    def taken(self) -> int:
        """Compiled calls of earlier processes that were made, for which nothing was compiled in this one."""
        return sum(len(region.calls.taken) for region in self.regions if region.calls is not None)

    def prewarm(self, pipeline: StreamInferencePipeline, start: Callable[[], Rollout]) -> int:
        """Compile and capture now for the shapes of such a rollout, and keep what was compiled; returns how many
        compilations there are then."""
        if self.regions or self.cuda_graphs:
            prewarm(pipeline, start)
            self._keep()
        return self.graphs

    def finish(self) -> None:
        """Call after a run: keeps what was compiled, and ends the profile."""
        self._keep()
        if self.profiler is not None:
            self.profiler.close()

    def _keep(self) -> None:
        if self.artifacts is not None and self.graphs:
            noted = [call for region in self.regions if region.calls is not None for call in region.calls.noted]
            self.kept = self.artifacts.save(noted) or self.kept


def apply(pipeline: StreamInferencePipeline, config: AccelerationConfig, ahead: Any = None) -> list[str]:
    """Do to ``pipeline`` what ``config`` asks for; returns what was done. A pipeline is accelerated once.

    Args:
        ahead: what :func:`ahead.begin` returned for it.

    Raises:
        ValueError: it has been already.
    """
    if pipeline.acceleration is not None:
        raise ValueError(f"{pipeline.config.name} is accelerated already; load it anew for another AccelerationConfig")
    done = pipeline.acceleration = Acceleration(config)
    _place(pipeline, done)
    _compile(pipeline, done, ahead)
    if config.cuda_graph:  # on modules that are quantized and compiled as they will be
        done.cuda_graphs = cuda_graph.apply(pipeline, max_slots=config.cuda_graph_slots)
        done.notes.append(f"CUDA graphs: {config.cuda_graph_slots} slots")
    if wanted(config.overlap_decode, pipeline.device) and pipeline.decoder is not None:
        pipeline.decode_lane = DecodeLane(pipeline.device)
        done.notes.append("chunks are decoded beside the next steps")
    if config.profile is not None:  # last, around all the rest
        done.profiler = Profiler(pipeline, None if config.profile == "lines" else Path(config.profile))
        done.notes.append("profiled")
    return done.notes


def _place(pipeline: StreamInferencePipeline, done: Acceleration) -> None:
    """Bring the transformers' weights to where they belong, in the form they are to have."""
    config, model = done.config, pipeline.diffusion_model
    done.approximations = approximations(pipeline.config, config)
    if config.kv_dtype != "model":
        store_kv_as(model.experts, config.kv_dtype)
    if config.quantize != "none":
        layers = quantize_blocks(model, config.quantize)
        done.notes.append(f"quantized: {layers} layers")
    if config.offload == "blocks" and (offload := offload_blocks(model)) is not None:
        done.notes.append(f"offloaded: {len(offload.blocks)} blocks, {offload.resident / 2**30:.2f} GiB on the device")
    elif not model.config.swap_experts:
        model.experts.to(model.device)
    if config.channels_last and pipeline.decoder is not None:
        done.notes.append(f"channels last: {channels_last(pipeline.decoder)} convolutions")


def wanted(choice: str, device: torch.device) -> bool:
    """What ``auto`` means on this device."""
    return choice == "on" or (choice == "auto" and device.type == "cuda")


def parts_to_compile(pipeline: StreamInferencePipeline, config: AccelerationConfig) -> list[nn.Module]:
    """Blocks of the transformers, and parts of the decoder, as far as ``config`` wants them compiled."""
    experts: Any = pipeline.diffusion_model.experts
    modules: list[nn.Module] = []
    if wanted(config.compile, pipeline.device):
        modules = [block for expert in experts for block in expert.blocks]
    if wanted(config.compile_decoder, pipeline.device) and pipeline.decoder is not None:
        modules += pipeline.decoder.compiled_parts
    return modules


def compile_and_keep(modules: list[nn.Module], artifacts: Artifacts | None) -> tuple[list[Region], int]:
    """Compile ``modules``; what was kept of an earlier run is taken up. Returns how many entries that were too."""
    entries = 0 if artifacts is None else artifacts.load()
    regions, prepared = compile_modules(modules), Event()

    def prepare() -> None:
        """Before the compiler is imported, if it is at all."""
        if prepared.is_set():
            return
        prepared.set()
        writable_compiler_folder()
        if artifacts is not None:
            artifacts.hand_over()
        if any(parameter.device.type == "cpu" for parameter in modules[0].parameters()):
            native.probe_processor()

    for region in regions:
        region.prepare = prepare
        if artifacts is not None:
            region.calls = artifacts.calls_of(region.kind.forward)
    if artifacts is None or not artifacts.has_calls:
        prepare()
    return regions, entries


def _compile(pipeline: StreamInferencePipeline, done: Acceleration, ahead: Any) -> None:
    config, name = done.config, pipeline.config.name
    experts: Any = pipeline.diffusion_model.experts
    if config.compile == "on" and not any(expert.blocks for expert in experts):
        say_once(f"{name} names no blocks to compile (Transformer.blocks), so that it runs as it is")
    modules = parts_to_compile(pipeline, config)
    if not modules:
        return
    if ahead is not None:
        ahead.wait()
    if ahead is not None and ahead.regions:
        done.artifacts, entries = ahead.artifacts, ahead.entries
        done.regions = compile_modules(modules, known=ahead.regions)
        done.notes.append("compiled while the weights were read")
    else:
        done.artifacts = Artifacts.of(pipeline.config, pipeline.device) if config.reuse_compiled else None
        done.regions, entries = compile_and_keep(modules, done.artifacts)
    if entries:
        done.notes.append(f"compiled code of an earlier run: {entries} entries")
    for expert in experts:
        _pause_while_recommitting(expert, done.regions)
    done.notes += [f"compiled: {region.kind.__name__}" for region in done.regions]


def _pause_while_recommitting(expert: Any, regions: list[Region]) -> None:
    """A recache reads selections of the window, each of a length that comes once, and is rare."""
    recommit = expert.recommit

    def uncompiled(*args: Any, **kwargs: Any) -> None:
        with ExitStack() as stack:
            for region in regions:
                stack.enter_context(region.paused())
            recommit(*args, **kwargs)

    expert.recommit = uncompiled
