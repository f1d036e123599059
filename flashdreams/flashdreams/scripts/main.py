"""``flashdreams``: the program that groups the tools. Each tool's module is imported when it is asked for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from flashdreams._version import __version__
from flashdreams.config.fields import nearest
from flashdreams.infra.errors import UserError
from flashdreams.scripts.console import columns, guarded

COMMANDS = {
    "run": ("flashdreams.scripts.run:run", "Make a video (the same as flashdreams-run)."),
    "list": ("flashdreams.scripts.listing:main", "List the installed runners (--json for programs)."),
    "doctor": ("flashdreams.scripts.doctor:main", "Check this machine: versions, devices, caches, ffmpeg, plugins."),
    "plan": ("flashdreams.scripts.plan:main", "Memory, work and speed of a model before anything is downloaded."),
    "warmup": ("flashdreams.scripts.warmup:main", "Compile a model and keep that, so that later starts do not wait."),
    "serve": ("flashdreams.scripts.serve:main", "Serve a model to browsers and programs."),
    "bench": ("flashdreams.scripts.bench:main", "Times of the parts of a run, beside a bound measured with them."),
    "train": ("flashdreams.scripts.train:main", "Train a model by a reward, with the sampler that serves it."),
    "checkpoint": ("flashdreams.scripts.checkpoint:main", "Inspect, verify, compare, convert and merge weights."),
}
"""Name: ``module:function`` that takes the words after the name and the program's name; what it does."""


def main() -> int:
    """Entry point of the program."""
    return guarded(lambda: dispatch(sys.argv[1:]))


def dispatch(words: Sequence[str]) -> int:
    """Run the tool that the first word names."""
    if not words or words[0] in ("-h", "--help"):
        tools = columns((name, text) for name, (_, text) in COMMANDS.items())
        print(
            f"usage: flashdreams <tool> [--flags]\n\n{tools}\n\n`flashdreams <tool> --help` says more; --version too."
        )
        return 0
    if words[0] == "--version":
        print(__version__)
        return 0
    if words[0] not in COMMANDS:
        hint = nearest(words[0], COMMANDS) or f"; there are {', '.join(COMMANDS)}"
        raise UserError(f"there is no tool {words[0]!r}{hint}")
    module, _, function = COMMANDS[words[0]][0].partition(":")
    return getattr(importlib.import_module(module), function)(words[1:], f"flashdreams {words[0]}")


if __name__ == "__main__":
    sys.exit(main())
