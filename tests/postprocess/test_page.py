"""The example of the page on post-processors runs as it stands there."""

from __future__ import annotations

import re
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from flashdreams.plugins.registry import get_postprocessor

pytestmark = pytest.mark.ci_cpu

PAGE = Path(__file__).parents[2] / "docs" / "developer_guides" / "postprocessors.md"


@pytest.fixture
def example(tmp_path, monkeypatch) -> Path:
    """The page's Python blocks as the files they name."""
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        path = tmp_path / re.match(r"# (\S+\.py)\n", block)[1]
        path.parent.mkdir(exist_ok=True)
        path.write_text(block)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("FLASHDREAMS_POSTPROCESSORS", "film-grain=film_grain.config:GRAIN")
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("film_grain")]:
        del sys.modules[name]


def test_the_post_processor_keeps_the_rule_of_the_page(example):
    grain = get_postprocessor("film-grain").setup()
    frames = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (7, 6, 8, 3), dtype=np.uint8))
    whole = grain.run(frames, seed=4)
    state = grain.open(6, 8, Fraction(16), seed=4)
    pieces = [grain.push(piece, state) for piece in frames.split([3, 0, 4])]
    assert torch.equal(torch.cat([*pieces, grain.finish(state)]), whole)
    assert 6 < (whole.float() - frames.float()).std() < 9, "of strength 8, less what is clipped"
    assert not torch.equal(grain.run(frames, seed=5), whole)


def test_the_script_of_the_page_runs(example, capsys):
    exec(compile((example / "example.py").read_text(), "example.py", "exec"), {})
    shapes = capsys.readouterr().out.split("\n")
    assert [shape.startswith("torch.Size([") for shape in shapes[:3]] == [True] * 3
    assert shapes[2] == "torch.Size([0, 128, 128, 3])"
