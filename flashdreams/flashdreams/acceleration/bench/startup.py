"""A fresh process from its start to the first frames, beside one that imports PyTorch and ends."""

from __future__ import annotations

import json
import subprocess
import sys

from flashdreams.acceleration.bench.report import Entry
from flashdreams.acceleration.bench.sampling import Plan, interleave

_PROGRAM = """
import json, sys, time
begun = time.perf_counter()
import flashdreams
from flashdreams.config import derive_config
from flashdreams.plugins.registry import get_runner
from flashdreams.infra.load import load_pipeline
slug, device, compile = sys.argv[1:]
config = get_runner(slug)
imported = time.perf_counter()
pipeline = load_pipeline(config.pipeline, device=device)
if compile != "off":
    from flashdreams.acceleration.apply import apply
    from flashdreams.infra.acceleration_config import AccelerationConfig
    apply(pipeline, AccelerationConfig(compile=compile))
loaded = time.perf_counter()
rollout = pipeline.rollout(config.prompt, num_chunk=1)
next(rollout).frames.cpu()
made = time.perf_counter()
if compile != "off":
    pipeline.acceleration.finish()
print(json.dumps({"import": imported - begun, "load": loaded - imported, "first chunk": made - loaded}))
"""


def measure_startup(slug: str, *, device: str, compile: str, plan: Plan) -> tuple[list[Entry], dict[str, str]]:
    """Times of the parts of a start, each round in a process of its own.

    Raises:
        RuntimeError: such a process failed; with what it said last.
    """
    phases: dict[str, list[float]] = {}

    def start() -> None:
        said = _run(_PROGRAM, slug, device, compile)
        for name, seconds in json.loads(said.splitlines()[-1]).items():
            phases.setdefault(name, []).append(seconds)

    times = interleave({"bound": lambda: _run("import torch"), "process": start}, plan)
    entries = [Entry("process", times["process"], times["bound"], note="the bound is a process that imports torch")]
    entries += [Entry(name, tuple(seconds[plan.warmup :])) for name, seconds in phases.items()]
    return entries, {}


def _run(program: str, *words: str) -> str:
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip() or "nothing was said").splitlines()[-1]
        raise RuntimeError(f"a process that was started to be measured failed: {last}")
    return done.stdout
