"""The comparison with the original: its command line and what is its own in it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import parity

pytestmark = pytest.mark.ci_cpu


@pytest.fixture
def script():
    path = Path(__file__).parent / "parity_check/run.py"
    spec = importlib.util.spec_from_file_location("longlive_parity", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_command_line_names_both_files(script) -> None:
    words = "ours --base b.pt --lora l.pt --reference r.safetensors".split()
    assert script.parser().parse_args(words).threshold == parity.THRESHOLD
