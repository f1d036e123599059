"""Runs the command line, in this process or another, with the template as a plugin in development."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

TEMPLATE = "template=flashdreams.recipes.template.config:RUNNER_TEMPLATE"
RUN = "import sys; from flashdreams.scripts.run import main; sys.exit(main())"


@dataclass
class Result:
    code: int
    out: str
    err: str


def environment(**extra: str) -> dict[str, str]:
    return {**os.environ, "FLASHDREAMS_RUNNER_CONFIGS": TEMPLATE, "OMP_NUM_THREADS": "1", **extra}


def run_process(*words: str | Path, **extra: str) -> Result:
    """``flashdreams-run`` in a fresh process."""
    done = subprocess.run(
        [sys.executable, "-c", RUN, *map(str, words)], env=environment(**extra), capture_output=True, text=True
    )
    return Result(done.returncode, done.stdout, done.stderr)


def start_process(*words: str | Path, **extra: str) -> subprocess.Popen:
    """The same, left running; its own process group takes signals."""
    return subprocess.Popen(
        [sys.executable, "-c", RUN, *map(str, words)], env=environment(**extra), stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
        # a shell's background jobs ignore Ctrl-C, and so would what they start
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
