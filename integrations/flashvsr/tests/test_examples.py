"""The example script, on models that need no weights."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import av
import pytest

from flashdreams.infra.postprocess import PipelinePostprocessorConfig
from small_flashvsr import narrow
from template_model import template_pipeline

pytestmark = pytest.mark.ci_cpu


def test_frames_come_out_larger_and_as_many(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = Path(__file__).parents[1] / "examples/live.py"
    spec = importlib.util.spec_from_file_location("live", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    pipeline = template_pipeline()
    config = PipelinePostprocessorConfig(name="small", description="small and random", pipeline=narrow())
    monkeypatch.setattr(script, "load_pipeline", lambda slug, device: pipeline)
    monkeypatch.setattr(script, "get_postprocessor", lambda name: config)
    script.main("a red circle moves right", tmp_path / "out.mp4", chunks=2, device="cpu")
    with av.open(str(tmp_path / "out.mp4")) as video:
        frames = list(video.decode(video=0))
    size = 4 * pipeline.config.height, 4 * pipeline.config.width
    assert [(frame.height, frame.width) for frame in frames] == [size] * pipeline.config.frames_until(2)
