"""Case B14: a user id without a passwd entry, no HOME, as in a container."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cli import RUN, TEMPLATE

pytestmark = pytest.mark.ci_cpu

NO_PASSWD = Path(__file__).parents[1] / "cases" / "B14" / "nopasswd"


def nameless(*words: str, folder: Path) -> subprocess.CompletedProcess:
    unset = ("USER", "LOGNAME", "USERNAME", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment |= {
        "HOME": "/proc/none", "PYTHONPATH": str(NO_PASSWD), "TMPDIR": str(folder),
        "FLASHDREAMS_RUNNER_CONFIGS": TEMPLATE, "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [sys.executable, "-c", RUN, *words]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)


def test_a_nameless_user_without_a_home_can_list_and_run(tmp_path):
    probe = subprocess.run(
        [sys.executable, "-c", "import pwd; pwd.getpwuid(0)"], env={**os.environ, "PYTHONPATH": str(NO_PASSWD)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert "uid not found" in probe.stderr, "the stand-in for the missing passwd entry is not in force"
    listing = nameless(folder=tmp_path)
    assert listing.returncode == 0 and "template" in listing.stdout, listing.stderr
    run = nameless("template", "--num-chunk", "2", folder=tmp_path)
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "outputs" / "template.mp4").stat().st_size > 0
    assert "Traceback" not in run.stderr
