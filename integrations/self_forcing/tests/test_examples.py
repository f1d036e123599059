"""The example scripts, on a pipeline that needs no weights."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import av
import pytest

from template_model import template_pipeline

pytestmark = pytest.mark.ci_cpu


def test_a_stream_changes_its_prompt_every_few_chunks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = Path(__file__).parents[1] / "examples/switch_prompts.py"
    spec = importlib.util.spec_from_file_location("switch_prompts", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    pipeline, asked = template_pipeline(), []
    encode = pipeline.encode_prompts
    monkeypatch.setattr(pipeline, "encode_prompts", lambda prompts, *a, **k: asked.append(*prompts) or encode(prompts))
    monkeypatch.setattr(script, "load_pipeline", lambda slug: pipeline)
    monkeypatch.setattr(script, "CHUNKS", 2)
    script.main(["a", "b", "c"], tmp_path / "out.mp4")
    assert asked == ["a", "b", "c"]
    with av.open(str(tmp_path / "out.mp4")) as video:
        assert len(list(video.decode(video=0))) == pipeline.config.frames_until(6)
