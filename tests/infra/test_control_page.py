"""The examples of the page on controls run as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.ci_cpu

PAGE = Path(__file__).resolve().parents[2] / "docs/developer_guides/controls.md"


def test_the_examples_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "page"}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 6
    for block in blocks:
        exec(compile(block, PAGE.name, "exec", dont_inherit=True), names)
    assert "key 'q' is not known; this model takes the keys w, s; mouse motion" in capsys.readouterr().out
