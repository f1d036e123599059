"""Case B14: packages and caches in folders that cannot be written. As root no permission bit forbids anything, so an
audit hook of the interpreter does."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from cli import RUN

pytestmark = pytest.mark.ci_cpu

READ_ONLY = """
import errno, os, sys
from pathlib import Path
import flashdreams, tiny_world

places = [str(Path(module.__file__).parent) for module in (flashdreams, tiny_world)] + [os.environ["FLASHDREAMS_CACHE"]]
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT

def forbid(event, args):
    opened = event == "open" and isinstance(args[2], int) and args[2] & WRITES
    if opened or event in ("os.mkdir", "os.rename", "os.remove"):
        if isinstance(args[0], (str, bytes, os.PathLike)) and os.fsdecode(args[0]).startswith(tuple(places)):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), args[0])

sys.addaudithook(forbid)
for place in places:
    try:
        open(place + "/probe", "w")
    except OSError:
        continue
    raise SystemExit("the folders are not read-only")
"""


def test_a_run_with_packages_and_cache_that_cannot_be_written(tmp_path):
    cache = tmp_path / "read-only"
    cache.mkdir()
    environment = os.environ | {
        "FLASHDREAMS_CACHE": str(cache), "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "",
    }  # fmt: skip
    words = ["tiny-world", "--num-chunk", "1", "--seed", "1", "--output", str(tmp_path / "a.mp4")]
    done = subprocess.run(
        [sys.executable, "-c", READ_ONLY + RUN, *words], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "a.mp4").stat().st_size > 0
    assert '"sha256:' in (tmp_path / "a.json").read_text()
    assert done.stderr.count("cannot be written") == 1
    assert (
        f"the cache folder {cache} cannot be written; using" in done.stderr and "set FLASHDREAMS_CACHE" in done.stderr
    )
    assert list(cache.iterdir()) == []
