"""``flashdreams warmup``: compile a model for the shapes of a run, and keep that for later starts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from flashdreams.config import derive_config
from flashdreams.infra.errors import UserError
from flashdreams.plugins.registry import get_runner
from flashdreams.scripts.run import configured, take_apart


def main(words: Sequence[str], program: str) -> int:
    """``flashdreams warmup <slug> [--flags]``, with the flags of a run."""
    line = take_apart(words)
    if line.slug is None or line.switches & {"--help", "--help-all"}:
        print(
            f"usage: {program} <slug> [--flags]\n\n"
            "Loads the model and runs each of its shapes once, so that all of it is compiled, and keeps the compiled\n"
            "code in the folder `compiled` of the caches (FLASHDREAMS_CACHE). Later compiled runs of this model, size\n"
            "and device on this machine take it from there. Takes the flags of flashdreams-run <slug>, such as\n"
            "--height and --width for another size.\n\n"
            f"  {program} tiny-world\n  {program} tiny-world --height 256 --width 256"
        )
        return 0 if line.switches else 2
    if line.replay is not None:
        raise UserError("a replay is of one run; warmup takes a slug and flags, or --config FILE")
    config = configured(get_runner(line.slug), line)
    if config.acceleration.compile == "auto":
        config = derive_config(config, acceleration={"compile": "on"})
    begun = time.perf_counter()
    runner: Any = config.setup()
    acceleration = runner.warm_up().acceleration
    seconds = time.perf_counter() - begun
    if not acceleration.regions:
        print(f"{line.slug}: there is nothing to compile ({'; '.join(acceleration.notes) or 'it is switched off'})")
        return 0
    kinds = ", ".join(region.kind.__name__ for region in acceleration.regions)
    taken = f", {acceleration.taken} taken from an earlier run" if acceleration.taken else ""
    print(f"{line.slug}: {acceleration.graphs} shapes of {kinds} compiled{taken} in {seconds:.1f} s")
    if acceleration.kept is not None:
        print(f"kept: {acceleration.kept}  {acceleration.kept.stat().st_size / 2**20:.1f} MiB")
    elif config.acceleration.reuse_compiled:
        print("all of it was kept already")
    return 0
