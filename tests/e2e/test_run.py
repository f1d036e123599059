"""A run from the command line to its files."""

from __future__ import annotations

import json
import signal
import time
from fractions import Fraction
from pathlib import Path

import av
import pytest

from cli import run_process, start_process
from flashdreams.core.media.video import read_video_frames

pytestmark = pytest.mark.ci_cpu

CASES = Path(__file__).parents[1] / "cases"


def test_video_record_and_preview(tmp_path):
    result = run_process(
        "template", "--output", tmp_path / "a.mp4", "--seed", "5", "--preview", "--fps", "23.976", "--num-chunk", "3",
        "--control", "0.5,0.5,-0.5",
    )  # fmt: skip
    assert result.code == 0, result.err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.json", "a.mp4", "a.png"]
    assert read_video_frames(tmp_path / "a.mp4").shape == (17, 32, 48, 3)
    with av.open(str(tmp_path / "a.mp4")) as file:
        assert abs(float(file.streams.video[0].average_rate) / 23.976 - 1) < 1e-4
    record = json.loads((tmp_path / "a.json").read_text())
    assert record["slug"] == "template" and record["seed"] == 5 and record["output"]["fps"] == "2997/125"
    assert {"load_s", "time_to_first_frame_s", "dit_fps", "decode_fps", "end_to_end_fps"} <= record["timings"].keys()
    for words in ("first frame after", "FPS end to end", "DiT alone", "decode alone", "a.mp4"):
        assert words in result.out + result.err


def test_replay_repeats_bit_for_bit_and_a_random_seed_is_printed(tmp_path):
    first = run_process("template", "--output", tmp_path / "a.mp4", "--guidance-scale", "2", "--num-chunk", "4")
    seed = json.loads((tmp_path / "a.json").read_text())["seed"]
    assert f"seed {seed}" in first.err and 0 <= seed < 2**64
    again = run_process("template", "--replay", tmp_path / "a.json", "--output", tmp_path / "b.mp4")
    assert again.code == 0, again.err
    assert "warning" not in again.err
    assert (read_video_frames(tmp_path / "a.mp4") == read_video_frames(tmp_path / "b.mp4")).all()
    other = run_process(
        "template", "--replay", tmp_path / "a.json", "--output", tmp_path / "c.mp4", OMP_NUM_THREADS="2"
    )
    assert other.code == 0 and "threads" in other.err


@pytest.mark.parametrize("seed", ["0", "4294967296", "9007199254740993", "18446744073709551615"])
def test_b10_seeds_are_recorded_exactly(tmp_path, seed):
    run_process("template", "--output", tmp_path / "a.mp4", "--seed", seed, "--num-chunk", "1")
    assert f'"seed": {seed},' in (tmp_path / "a.json").read_text()


def test_a_wrong_size_is_snapped_and_said(tmp_path):
    result = run_process(
        "template", "--output", tmp_path / "a.mp4", "--height", "30", "--width", "50", "--num-chunk", "2"
    )
    assert "32x48" in result.err
    assert read_video_frames(tmp_path / "a.mp4").shape[1:3] == (32, 48)


def test_first_image_is_cropped_not_squashed(tmp_path):
    result = run_process(
        "template",
        "--output",
        tmp_path / "a.mp4",
        "--image",
        CASES / "B03" / "wide_disc_640x60.png",
        "--num-chunk",
        "2",
    )
    assert result.code == 0 and "crop" in result.err


def wait_for_frames(path: Path, process) -> None:
    deadline = time.monotonic() + 120
    while not (path.exists() and path.stat().st_size > 20_000):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_leaves_a_playable_file(tmp_path, sent):
    path = tmp_path / "a.mp4"
    process = start_process("template", "--output", path, "--num-chunk", "1000000", "--seed", "1")
    wait_for_frames(path, process)
    process.send_signal(sent)
    process.communicate(timeout=60)
    frames = read_video_frames(path)
    assert len(frames) > 8 and len(frames) % 8 == 1
    with av.open(str(path)) as file:
        assert file.streams.video[0].average_rate == Fraction(16)
    if sent != signal.SIGKILL:
        assert process.returncode == 130
        record = json.loads((tmp_path / "a.json").read_text())
        assert record["output"]["interrupted"] and record["output"]["frames"] == len(frames)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["a.json", "a.mp4"]
