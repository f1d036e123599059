"""Rewrite the pins in the root pyproject.toml and requirements.lock: ``python .ci/lock.py [--upgrade]``.

Resolves a copy of the workspace for every platform, without local wheel folders, so that the result is the same on
every machine. Needs ``uv`` and the network. New dependencies get a pin; existing pins move only with ``--upgrade``.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PINS = re.compile(r"(?<=\nconstraint-dependencies = \[\n).*?(?=\])", re.DOTALL)
HAND_PINNED = ("torch==2.13.0",)
EXPORT = ["uv", "export", "--format", "requirements.txt", "--no-header", "--no-annotate"]
SELECT = ["--all-packages", "--all-groups", "--all-extras", "--no-emit-workspace", "--quiet"]


def resolve(pins: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """Return the text of requirements.lock under ``pins``, and the exact versions in it, oldest first per package."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for member in ("flashdreams", "integrations"):
            shutil.copytree(ROOT / member, copy / member, ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"))
        (copy / "pyproject.toml").write_text(with_pins(pins))
        environment = {key: value for key, value in os.environ.items() if key != "UV_FIND_LINKS"}
        lock = subprocess.run(
            [*EXPORT, *SELECT], cwd=copy, env=environment, check=True, stdout=subprocess.PIPE, text=True
        )
    return lock.stdout, tuple(re.findall(r"^[\w.-]+==[^\s;\\]+", lock.stdout, re.MULTILINE))


def with_pins(pins: tuple[str, ...]) -> str:
    """The root pyproject.toml with ``pins`` as its constraint-dependencies."""
    text = (ROOT / "pyproject.toml").read_text()
    return PINS.sub(lambda _: "".join(f'    "{pin}",\n' for pin in pins), text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions instead of the present pins")
    upgrade = parser.parse_args().upgrade
    present = PINS.search((ROOT / "pyproject.toml").read_text())
    assert present is not None, "pyproject.toml has no constraint-dependencies list"
    pins = HAND_PINNED if upgrade else tuple(re.findall(r'"([^"]+)"', present.group()))
    while True:
        lock, found = resolve(pins)
        # A package that resolves to several versions takes the first, which is the one for the oldest Python.
        chosen = tuple({pin.split("==")[0]: pin for pin in reversed(found)}.values())[::-1]
        if len(chosen) == len(found):
            break
        pins = chosen
    (ROOT / "requirements.lock").write_text(lock)
    (ROOT / "pyproject.toml").write_text(with_pins(chosen))
    print(f"{len(chosen)} packages pinned; commit pyproject.toml and requirements.lock together")


if __name__ == "__main__":
    main()
