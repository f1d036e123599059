"""The example scripts, on a pipeline that needs no weights."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import av
import pytest

from template_model import template_pipeline

pytestmark = pytest.mark.ci_cpu


def test_a_story_has_as_many_scenes_as_lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = Path(__file__).parents[1] / "examples/story.py"
    spec = importlib.util.spec_from_file_location("story", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    pipeline, asked = template_pipeline(), []
    encode = pipeline.encode_prompts
    monkeypatch.setattr(pipeline, "encode_prompts", lambda prompts, *a, **k: asked.append(*prompts) or encode(prompts))
    monkeypatch.setattr(script, "load_pipeline", lambda slug: pipeline)
    monkeypatch.setattr(script, "SECONDS", 1)
    (tmp_path / "story.txt").write_text("a\n\n b \n")
    script.main(tmp_path / "story.txt", tmp_path / "out.mp4")
    assert asked == ["a", "b"]
    with av.open(str(tmp_path / "out.mp4")) as video:
        count = len(list(video.decode(video=0)))
    assert 2 <= count / pipeline.config.fps < 2 + 8 / pipeline.config.fps
