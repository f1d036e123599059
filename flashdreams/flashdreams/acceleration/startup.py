"""How long a model takes to its first frame in a fresh process, with kept compiled code and without."""

from __future__ import annotations

import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flashdreams.acceleration.artifacts import COMPILER_VARIABLE
from flashdreams.config import derive_config
from flashdreams.core.caches import VARIABLE
from flashdreams.infra.config import RunnerConfig

_PROGRAM = "import sys; from flashdreams.acceleration.startup import first_frame; first_frame(sys.argv[1])"


@dataclass(frozen=True)
class Start:
    """Seconds of one start, from the start of the process on."""

    imported: float
    loaded: float
    first_frame: float
    """Everything included: imports, weights, compilation, the first chunk."""
    kept: bool
    """Whether it took up compiled code of an earlier process."""
    compiler: bool
    """Whether it imported the compiler."""


@dataclass(frozen=True)
class Startup:
    """Starts of compiled runs, each in a fresh process with an empty compiler cache."""

    without: tuple[Start, ...]
    kept: tuple[Start, ...]

    @property
    def ratio(self) -> float:
        """Median time to the first frame without kept code, over that with it."""
        cold, warm = (statistics.median(start.first_frame for start in each) for each in (self.without, self.kept))
        return cold / warm

    def describe(self) -> str:
        """For people."""
        cold, warm = (statistics.median(start.first_frame for start in each) for each in (self.without, self.kept))
        return f"first frame after {cold:.1f} s without kept code, {warm:.1f} s with it: {self.ratio:.1f} x"


def measure(config: RunnerConfig, *, repeats: int = 5, prewarm: bool = False) -> Startup:
    """Start ``config``'s model ``2 * repeats`` times, in turn without compiled code and with what that start kept.

    The compiler's folder and ours are empty ones in the system's temporary folder. A model without a text encoder is
    given zeros in place of its text.

    Args:
        prewarm: compile for every shape before the first frame, as a server does.
    """
    config = derive_config(config, acceleration={"compile": "on", "prewarm": prewarm, "reuse_compiled": True})
    without, kept = [], []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            without.append(_start(config, Path(folder), "first"))
            kept.append(_start(config, Path(folder), "second"))
    if any(start.kept for start in without) or not all(start.kept for start in kept):
        raise RuntimeError("compiled code was not kept, so that there is nothing to compare; is the cache writable?")
    return Startup(tuple(without), tuple(kept))


def _start(config: RunnerConfig, folder: Path, name: str) -> Start:
    request = folder / f"{name}.pickle"
    request.write_bytes(pickle.dumps(config))
    environment = {**os.environ, VARIABLE: str(folder / "kept"), COMPILER_VARIABLE: str(folder / name)}
    begun = time.time()
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(request)], env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"the model does not start: {done.stderr.strip()[-2000:]}")
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    start = Start(**told)
    return replace(
        start,
        imported=start.imported - begun,
        loaded=start.loaded - begun,
        first_frame=start.first_frame - begun,
    )


def first_frame(request: str) -> None:
    """What the measured process does; prints when, as JSON."""
    from flashdreams.acceleration.blank import blank_conditions, blank_layout
    from flashdreams.infra.load import load_pipeline

    config: RunnerConfig = pickle.loads(Path(request).read_bytes())
    imported = time.time()
    pipeline = load_pipeline(
        config.pipeline, device=config.device, dtype=config.dtype, acceleration=config.acceleration
    )
    acceleration = pipeline.acceleration
    loaded, kept = time.time(), acceleration.artifacts is not None and bool(acceleration.artifacts.known)
    transformer = config.pipeline.diffusion_model.transformer
    conditions = None
    if transformer.takes_text and config.pipeline.text_encoder is None:
        layout = blank_layout(pipeline, config.pipeline.height, config.pipeline.width)
        conditions = blank_conditions(config.pipeline, layout, pipeline.device)

    def start(num_chunk: int | None = None) -> Any:
        return pipeline.rollout(
            config.prompt if conditions is None else "", conditions=conditions, num_chunk=num_chunk,
            height=config.height, width=config.width,
        )  # fmt: skip

    if config.acceleration.prewarm:
        acceleration.prewarm(pipeline, start)
    for _ in start(num_chunk=1):
        told = {"imported": imported, "loaded": loaded, "first_frame": time.time(), "kept": kept}
    acceleration.finish()
    print(json.dumps({**told, "compiler": "torch._dynamo" in sys.modules}))
