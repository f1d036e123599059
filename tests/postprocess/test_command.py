"""From the command line, in a process of its own."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from cli import run_process, start_process
from flashdreams.core.media.video import read_video_frames
from video_model import POSTPROCESSORS_VARIABLE, RUNNERS_VARIABLE

pytestmark = pytest.mark.ci_cpu

B06 = Path(__file__).parents[1] / "cases" / "B06"
PLUGINS = {
    "FLASHDREAMS_RUNNER_CONFIGS": RUNNERS_VARIABLE,
    "FLASHDREAMS_POSTPROCESSORS": POSTPROCESSORS_VARIABLE,
    "PYTHONPATH": str(Path(__file__).parents[1] / "support"),
}


def test_a_video_file_from_flags_alone_with_a_post_processor_after_the_model(tmp_path):
    result = run_process(
        "video-x4", "--video", B06 / "clip_9frames_64x48.mp4", "--output", tmp_path / "a.mp4", "--preview",
        "--postprocess", "repeat-x1", "--postprocess", "repeat-x4", **PLUGINS,
    )  # fmt: skip
    assert result.code == 0, result.err
    assert read_video_frames(tmp_path / "a.mp4").shape == (9, 768, 1024, 3)
    assert "9 frames, 1024x768, 12 fps" in result.out
    for words in ("seed ", "post-processing alone", "DiT alone"):
        assert words in result.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "a.mp4", "a.png"]


def test_a_refused_flag_is_one_sentence(tmp_path):
    result = run_process("video-x4", "--video", B06 / "clip_1frames_64x48.mp4", "--num-frames", "3", **PLUGINS)
    assert (result.code, result.out) == (2, "")
    assert result.err == (
        "error: video-x4 takes no --num-frames: the video is as long as the file; leave it out\n"
    )  # fmt: skip


def test_a_signal_leaves_every_frame_that_was_generated_in_the_file(tmp_path):
    path = tmp_path / "a.mp4"
    process = start_process(
        "template", "--output", path, "--num-chunk", "100000", "--postprocess", "model-x4", **PLUGINS
    )
    while not path.exists() and process.poll() is None:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    record = json.loads((tmp_path / "a.json").read_text())
    assert record["output"]["interrupted"]
    frames = read_video_frames(path)
    assert len(frames) == record["output"]["frames"] == record["timings"]["frames"]
    assert len(frames) % 8 == 1, "whole chunks of the template, also those that waited in the post-processor"
