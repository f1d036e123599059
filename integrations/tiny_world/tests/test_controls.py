"""Steering the built-in model: words and keys, live and recorded."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch

from flashdreams import load_pipeline
from flashdreams.core.controls import Control, ControlError, ControlTimeline, Keys, LiveControls, Mouse, load_controls
from flashdreams.core.media.video import read_video_frames
from flashdreams.infra.pipeline import StreamInferencePipeline
from flashdreams.scripts.run import main

pytestmark = pytest.mark.ci_cpu

PROMPT = "a red circle stays still on a black background"


@pytest.fixture(scope="module")
def pipeline() -> StreamInferencePipeline:
    return load_pipeline("tiny-world", device="cpu")


def frames(rollout) -> torch.Tensor:
    return torch.cat([chunk.frames for chunk in rollout])


def steered(pipeline: StreamInferencePipeline, control: object) -> torch.Tensor:
    """Two chunks without control, three with it."""
    rollout = pipeline.rollout(PROMPT, seed=3, num_chunk=5)
    made = [next(rollout).frames, next(rollout).frames]
    rollout.set_control(control)
    return torch.cat([*made, frames(rollout)])


def column(frame: torch.Tensor) -> float:
    """Mean column of the shape, which is the only red thing."""
    red = frame[..., 0].float() > 100
    return float(red.nonzero()[:, 1].float().mean())


def test_words_and_keys_for_one_action_are_the_same_to_the_bit(pipeline) -> None:
    word = steered(pipeline, "right")
    for same in ("d", Keys("d"), Keys("ArrowRight"), Control(keys=Keys("a", "d"))):
        assert torch.equal(steered(pipeline, same), word)
    assert column(word[-1]) > column(word[4]) + 15
    left = steered(pipeline, Keys("a"))
    assert column(left[-1]) < column(left[4]) - 15


def test_what_it_does_not_take_is_named_and_changes_nothing(pipeline) -> None:
    rollout = pipeline.rollout(PROMPT, seed=3, num_chunk=3)
    made = [next(rollout).frames]
    for bad in ("jump", Keys("q"), Mouse(0.1), 0.5):
        with pytest.raises(ControlError, match=r"this model takes the words none, left, right, up, down; the keys w"):
            rollout.set_control(bad)
    plain = frames(pipeline.rollout(PROMPT, seed=3, num_chunk=3))
    assert torch.equal(torch.cat([*made, frames(rollout)]), plain)


def test_a_timeline_of_key_presses_is_the_list_of_its_frames(pipeline) -> None:
    timeline = ControlTimeline(pipeline.config.fps, pipeline.config.encoder.takes)
    for moment, keys in ((5 / 16, Keys("d")), (9.5 / 16, Keys("d", "w")), (13 / 16, Keys())):
        timeline.add(moment, keys)
    listed = [None] * 5 + ["right"] * 4 + ["up"] * 4 + ["none"] * 4
    first, second = (
        frames(pipeline.rollout(PROMPT, seed=3, num_chunk=5, control=control)) for control in (timeline, listed)
    )
    assert torch.equal(first, second)


def test_a_live_session_that_was_recorded_replays_bit_for_bit(pipeline, tmp_path) -> None:
    live, stop = LiveControls(pipeline.config.encoder.takes), threading.Event()

    def person() -> None:
        step = 0
        while not stop.wait(0.003):
            live.add(Keys("wasd"[step // 8 % 4]) if step % 3 else Keys())
            step += 1

    thread = threading.Thread(target=person)
    thread.start()
    try:
        made = frames(pipeline.rollout(PROMPT, seed=3, num_chunk=6, control=live, save_control=tmp_path / "a.jsonl"))
    finally:
        stop.set()
        thread.join()
    controls = load_controls(tmp_path / "a.jsonl").controls
    assert len(controls) == len(made) and any(control and control.keys for control in controls)
    assert torch.equal(frames(pipeline.rollout(PROMPT, seed=3, num_chunk=6, control=controls)), made)
    assert not torch.equal(frames(pipeline.rollout(PROMPT, seed=3, num_chunk=6)), made)


def test_a_recording_given_to_the_command_line_makes_the_same_video(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> None:
        monkeypatch.setattr(
            "sys.argv", ["flashdreams-run", "tiny-world", "--prompt", PROMPT, "--seed", "3", "--num-chunk", "5", *words]
        )
        assert main() == 0

    run("--control", "none:5 d:4 up:8", "--save-control", "a.jsonl", "--output", "a.mp4")
    run("--control", "a.jsonl", "--output", "b.mp4")
    run("--output", "c.mp4")
    first, again, other = (read_video_frames(Path(name)) for name in ("a.mp4", "b.mp4", "c.mp4"))
    assert (first == again).all() and not (first == other).all()
    assert json.loads(Path("b.json").read_text())["inputs"]["control"].startswith("sha256:")
