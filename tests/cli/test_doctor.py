"""``flashdreams doctor``: everything a run depends on, looked at; each problem with its advice, and the exit code."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flashdreams.core import notices
from flashdreams.core.attention import BACKENDS
from flashdreams.scripts import doctor, doctor_machine

pytestmark = pytest.mark.ci_cpu

NO_PASSWD = Path(__file__).parents[1] / "cases" / "B14" / "nopasswd"
PROGRAM = "import sys; from flashdreams.scripts.main import main; sys.exit(main())"


@pytest.fixture
def check(here, tools, monkeypatch, tmp_path):
    """Runs the doctor on a machine that is well, but for what a test breaks."""
    monkeypatch.setenv("FLASHDREAMS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(doctor_machine, "_LOW", 0)
    monkeypatch.setenv("USER", "someone")
    notices.reset()
    return lambda *words: here("doctor", *words, program=tools)


def advice(result, name: str) -> str:
    """The line of advice on ``name``, whose own line is marked."""
    assert f"! {name}" in result.out
    lines = [line for line in result.out.splitlines() if line.startswith(f"  -> {name}: ")]
    assert len(lines) == 1, result.out
    return lines[0].removeprefix(f"  -> {name}: ")


def test_a_machine_that_is_well_has_exit_code_0(check):
    result = check()
    assert result.code == 0, result.out
    assert result.out.endswith("no problem found\n") and "->" not in result.out
    words = " ".join(result.out.split())
    for text in (
        torch.__version__, "flashdreams", "safetensors", "cpu", "sdpa, cpu, float32", "reference, cpu, bfloat16",
        "hub downloads", "GB free", "a test video was written and read again", "plugin_fake:R, API 1 (not stated)",
    ):  # fmt: skip
        assert text in words


def test_words_it_does_not_know_are_a_mistake(check):
    result = check("--fast")
    assert (result.code, result.out) == (2, "")
    assert "'--fast' means nothing to flashdreams doctor" in result.err


def test_plugins_are_named_with_origin_and_api(check, plugins):
    plugins.add("stated", "FLASHDREAMS_API = 1")
    plugins.install("stated")
    plugins.add("future", "FLASHDREAMS_API = 9")
    plugins.add("broken", "import no_such_module_anywhere")
    result = check()
    assert result.code == 1 and result.out.endswith("2 problems found\n")
    assert "plugin-stated 1.0, plugin_stated:R, API 1" in " ".join(result.out.split())
    assert "made for API 9, this flashdreams speaks 1; update or uninstall it" in advice(result, "future")
    assert "No module named 'no_such_module_anywhere'; update or uninstall it" in advice(result, "broken")


def test_a_cache_that_cannot_be_written_is_a_problem_with_the_variable_that_moves_it(check, monkeypatch):
    monkeypatch.setenv("FLASHDREAMS_CACHE", "/proc/none/cache")
    result = check()
    assert result.code == 1 and result.out.endswith("1 problem found\n")
    assert advice(result, "flashdreams") == "set FLASHDREAMS_CACHE to a folder that can be written"


def test_a_folder_for_downloads_that_is_nearly_full_is_a_problem(check, monkeypatch):
    monkeypatch.setattr(doctor_machine, "_LOW", 10**9)
    usage = shutil.disk_usage(".")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10**9 - 1))
    result = check()
    assert result.code == 1
    assert "free some space, or set HF_HOME to a folder on a larger disk" in advice(result, "hub downloads")


def test_a_requirement_that_is_missing_or_too_old_is_a_problem(check, monkeypatch):
    version = importlib.metadata.version

    def other(name: str) -> str:
        if name == "einops":
            raise importlib.metadata.PackageNotFoundError(name)
        return "0.0.1" if name == "tqdm" else version(name)

    monkeypatch.setattr(importlib.metadata, "version", other)
    result = check()
    assert result.code == 1
    assert advice(result, "einops").startswith("pip install 'einops>=")
    assert advice(result, "tqdm").startswith("pip install 'tqdm>=")


def test_an_attention_backend_that_computes_wrongly_is_a_problem(check, monkeypatch):
    monkeypatch.setitem(BACKENDS, "fancy", lambda q, k, v, mask, scale: q * 0)
    result = check()
    assert result.code == 1
    assert "attention backend 'fancy' is wrong on cpu" in result.out
    assert "network.attention=sdpa" in advice(result, "fancy, cpu, float32")


def test_an_encoder_that_fails_is_a_problem(check, monkeypatch):
    def fail(*_: object) -> None:
        raise RuntimeError("no libx264 here")

    monkeypatch.setattr("flashdreams.core.media.video.VideoWriter.write", fail)
    result = check()
    assert result.code == 1
    assert "no libx264 here" in result.out and "pip install --force-reinstall av" in advice(result, "H.264")


def test_a_check_that_breaks_hides_no_other(check, monkeypatch):
    def breaks():
        yield "first", "fine"
        raise RuntimeError("boom")

    monkeypatch.setitem(doctor.SECTIONS, "Devices", breaks)
    result = check()
    assert result.code == 1
    assert "the check failed: RuntimeError: boom" in result.out and "a test video was written" in result.out


def test_case_b14_a_nameless_user_without_a_home_is_reported(tmp_path):
    unset = (
        "USER", "LOGNAME", "USERNAME", "LNAME",
        "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "FLASHDREAMS_CACHE", "HF_HOME",
    )  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment |= {"HOME": "/proc/none", "PYTHONPATH": str(NO_PASSWD), "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "doctor"], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "  -> flashdreams: set FLASHDREAMS_CACHE to a folder that can be written" in done.stdout
    assert "  -> hub downloads: set HF_HOME to a folder that can be written" in done.stdout
    assert "  -> compiled code: set TORCHINDUCTOR_CACHE_DIR" in done.stdout
    assert "a test video was written and read again" in done.stdout and "the check failed" not in done.stdout
