"""The example script and the example walk, on a pipeline that needs no weights."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path

import av
import pytest
import torch
from PIL import Image

from matrix_game_2.config import PIPELINE_MATRIX_GAME_2_UNIVERSAL

pytestmark = pytest.mark.ci_cpu

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_a_world_is_played_line_by_line(pipeline, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    spec = importlib.util.spec_from_file_location("play", EXAMPLES / "play.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    Image.fromarray(torch.randint(0, 256, (64, 64, 3), dtype=torch.uint8).numpy()).save(tmp_path / "picture.png")
    monkeypatch.setattr(script, "load_pipeline", lambda slug: pipeline)
    monkeypatch.setattr("sys.stdin", io.StringIO("w\nfly\nw+look-left\n\nquit\ns\n"))
    script.main(str(tmp_path / "picture.png"), tmp_path / "out.mp4")
    said = capsys.readouterr().err
    assert "takes the keys forward, w" in said and "'fly' is not known" in said
    with av.open(str(tmp_path / "out.mp4")) as video:
        assert len(list(video.decode(video=0))) == 9 + 12 + 12


def test_the_walk_is_understood_and_fits_a_run() -> None:
    encoder = PIPELINE_MATRIX_GAME_2_UNIVERSAL.encoder
    controls = encoder.parse_controls(str(EXAMPLES / "walk.txt"), 117)
    assert len(controls) == 120
    rows = [encoder.setup().row(control) for control in controls]
    assert rows[0][0] == 1 and rows[24][-1] == pytest.approx(-0.1) and not any(rows[84])
