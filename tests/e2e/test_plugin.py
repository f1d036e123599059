"""A plugin outside this repository runs end to end, found by entry point or by environment variable."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

from cli import run_process
from flashdreams.core.media.video import read_video_frames

pytestmark = pytest.mark.ci_cpu

CONFIG = """
    from flashdreams.config import derive_config
    from flashdreams.recipes.template.config import RUNNER_TEMPLATE

    FLASHDREAMS_API = 1
    RUNNER_MINE = derive_config(
        RUNNER_TEMPLATE,
        runner_name="mine-1b",
        description="A model nobody here has heard of",
        pipeline={"name": "mine-1b", "diffusion_model": {"transformer": {"network": {"num_layers": 1}, "len_t": 1}}},
    )
    MINE_CONFIGS = {"mine-1b": RUNNER_MINE}
"""


def install(folder: Path, package: str, config: str, entry_point: str | None) -> Path:
    """A plugin as pip would lay it out: the package, and its metadata."""
    (folder / package).mkdir(parents=True)
    (folder / package / "__init__.py").write_text("")
    (folder / package / "config.py").write_text(textwrap.dedent(config))
    if entry_point:
        info = folder / f"{package}-0.1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.1\nRequires-Dist: flashdreams\n"
        )
        (info / "entry_points.txt").write_text(f"[flashdreams.runner_configs]\n{entry_point}\n")
    return folder


def check_run(tmp_path: Path, **extra: str) -> str:
    result = run_process("mine-1b", "--num-chunk", "3", "--output", tmp_path / "a.mp4", **extra)
    assert result.code == 0, result.err
    assert len(read_video_frames(tmp_path / "a.mp4")) == 9
    record = json.loads((tmp_path / "a.json").read_text())
    assert record["slug"] == "mine-1b"
    assert record["config"]["pipeline"]["diffusion_model"]["transformer"]["network"]["num_layers"] == 1
    return result.err


def test_by_entry_point_beside_a_broken_one(tmp_path):
    site = install(tmp_path / "site", "mine", CONFIG, "mine-1b = mine.config:MINE_CONFIGS")
    install(site, "broken", "import no_such_module", "broken-2b = broken.config:RUNNER")
    stderr = check_run(tmp_path, PYTHONPATH=str(site))
    assert "broken" not in stderr
    listing = run_process(PYTHONPATH=str(site))
    assert listing.code == 0
    assert "mine-1b" in listing.out and "A model nobody here has heard of" in listing.out
    warnings = [line for line in listing.err.splitlines() if "broken-2b" in line]
    assert len(warnings) == 1 and "no_such_module" in warnings[0]
    asked = run_process("broken-2b", PYTHONPATH=str(site))
    assert asked.code == 2 and "no_such_module" in asked.err and "Traceback" not in asked.err


def test_by_environment_variable(tmp_path):
    site = install(tmp_path / "site", "mine", CONFIG, None)
    check_run(tmp_path, PYTHONPATH=str(site), FLASHDREAMS_RUNNER_CONFIGS="mine-1b=mine.config:RUNNER_MINE")
