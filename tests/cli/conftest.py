"""Plugins in a temporary folder, whose runner needs no torch, and the programs of the command line."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from flashdreams.plugins.registry import ENTRY_POINT_GROUP, ENV_VAR
from flashdreams.scripts import main as tools
from flashdreams.scripts import run as run_program

CONFIG = '''
from dataclasses import dataclass
from typing import ClassVar, Literal
from flashdreams.config import derive_config
from flashdreams.infra.config import RunnerConfig
from flashdreams.recipes.template.config import RUNNER_TEMPLATE

@dataclass(frozen=True, kw_only=True)
class FakeRunnerConfig(RunnerConfig):
    _target: ClassVar[str] = "fake_model:FakeRunner"
    act: Literal["write", "refuse", "misconfigure", "interrupt", "crash", "lose-reader"] = "write"
    """What the fake does."""

def fake(slug):
    pipeline = derive_config(RUNNER_TEMPLATE.pipeline, name=slug)
    return FakeRunnerConfig(runner_name=slug, description=f"The fake called {slug}.", pipeline=pipeline)
'''
MODEL = """
import json
from flashdreams.config import ConfigError
from flashdreams.infra.errors import UserError

class FakeRunner:
    def __init__(self, config):
        self.config = config

    def run(self):
        act = self.config.act
        if act == "refuse":
            raise UserError("the fake refuses")
        if act == "misconfigure":
            raise ConfigError("the fake is misconfigured")
        if act == "crash":
            raise RuntimeError("the fake is broken")
        if act == "lose-reader":
            raise BrokenPipeError("some other pipe")
        try:
            if act == "interrupt":
                raise KeyboardInterrupt
        finally:
            self.config.output.write_text(repr(self.config))
        record = {"slug": "fake", "config": {}, "seed": 0, "checkpoint": {"part": "sha256:new"}}
        self.config.output.with_suffix(".json").write_text(json.dumps(record))
        return self.config.output
"""


@dataclass
class Result:
    code: int
    out: str
    err: str


class Plugins:
    """A folder with plugins; the first one is the fake of the slug ``fake``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries: dict[str, str] = {}
        (folder / "fake_config.py").write_text(CONFIG)
        (folder / "fake_model.py").write_text(MODEL)
        self.add("fake")

    def add(self, slug: str, body: str = "") -> None:
        """A plugin in development, with the ``body`` before its config."""
        module = "plugin_" + slug.replace("-", "_")
        text = f"{textwrap.dedent(body)}\nfrom fake_config import fake\nR = fake({slug!r})\n"
        (self.folder / f"{module}.py").write_text(text)
        self.entries[slug] = f"{module}:R"

    def fake_torch(self) -> None:
        """A torch that imports at once, with what tyro looks for in it."""
        (self.folder / "torch.py").write_text("class device: pass\n")

    def install(self, slug: str) -> None:
        """The plugin as a distribution with an entry point, as ``pip install`` leaves it."""
        info = self.folder / f"plugin_{slug}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: plugin-{slug}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\n{slug} = {self.entries.pop(slug)}\n")

    @property
    def variable(self) -> str:
        return ",".join(f"{slug}={reference}" for slug, reference in self.entries.items())


@pytest.fixture
def plugins(tmp_path: Path) -> Plugins:
    folder = tmp_path / "plugins"
    folder.mkdir()
    return Plugins(folder)


@pytest.fixture
def here(
    plugins: Plugins, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., Result]:
    """Runs ``flashdreams-run`` (or ``flashdreams`` with ``program=tools``) in this process, in an empty folder."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.syspath_prepend(str(plugins.folder))
    known = set(sys.modules)

    def call(*words: str | Path, program=run_program) -> Result:
        monkeypatch.setenv(ENV_VAR, plugins.variable)
        monkeypatch.setattr("sys.argv", ["program", *map(str, words)])
        code = program.main()
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    yield call
    for name in [name for name in set(sys.modules) - known if name.startswith(("plugin_", "fake_"))]:
        del sys.modules[name]


@pytest.fixture
def elsewhere(plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs one of the programs in a fresh process; the last line of ``err`` lists the heavy modules it imported."""
    heavy = "('torch', 'numpy', 'av', 'imageio', 'PIL', 'tyro', 'yaml')"
    ending = f"print('imported:', *[name for name in {heavy} if name in sys.modules], file=sys.stderr); sys.exit(code)"

    def call(*words: str | Path, program=run_program) -> Result:
        monkeypatch.setenv(ENV_VAR, plugins.variable)
        monkeypatch.setenv("PYTHONPATH", str(plugins.folder), prepend=os.pathsep)
        code = f"import sys; from {program.__name__} import main; code = main(); {ending}"
        done = subprocess.run([sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True)
        return Result(done.returncode, done.stdout, done.stderr)

    return call


@pytest.fixture(name="tools")
def _tools():
    return tools
