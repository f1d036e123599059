"""``--postprocess`` on any runner: sizes, rates, lengths, records, and what is kept when a run ends early."""

from __future__ import annotations

import json
import signal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from flashdreams.config import derive_config
from flashdreams.core.media.video import VideoWriter, read_video_frames
from flashdreams.infra.errors import UserError
from flashdreams.infra.postprocess.flag import postprocessors
from flashdreams.infra.rollout import Rollout
from flashdreams.infra.runner import Runner
from flashdreams.infra.signals import interrupt_later
from flashdreams.plugins.registry import discover_postprocessors
from flashdreams.recipes.filters import config as built_in
from flashdreams.recipes.template.config import RUNNER_TEMPLATE
from flashdreams.scripts.recording import read_record
from video_model import POSTPROCESSORS_VARIABLE

pytestmark = pytest.mark.ci_cpu

RUNNER = derive_config(RUNNER_TEMPLATE, pipeline={"diffusion_model": {"transformer": {"checkpoint_path": "random:1"}}})


@pytest.fixture(autouse=True)
def plugins(monkeypatch):
    variable = POSTPROCESSORS_VARIABLE
    for name in built_in.POSTPROCESSORS.keys() - discover_postprocessors().keys():
        variable += f",{name}={built_in.__name__}:POSTPROCESSORS"
    monkeypatch.setenv("FLASHDREAMS_POSTPROCESSORS", variable)


def run(folder: Path, *names: str, **fields) -> tuple[np.ndarray, dict]:
    """Frames and record of a run through these post-processors."""
    config = derive_config(RUNNER, output=folder / "a.mp4", seed=3, postprocess=names, **fields)
    path = config.setup().run()
    return read_video_frames(path), json.loads(path.with_suffix(".json").read_text())


def generated(num_chunk: int) -> torch.Tensor:
    pipeline = RUNNER.pipeline.setup()
    return torch.cat([chunk.frames for chunk in pipeline.rollout(RUNNER.prompt, seed=3, num_chunk=num_chunk)])


def in_a_file(frames: torch.Tensor, folder: Path, fps: int = 16) -> np.ndarray:
    with VideoWriter(folder / "reference.mp4", Fraction(fps), *frames.shape[1:3]) as writer:
        writer.write(frames.numpy())
    return read_video_frames(folder / "reference.mp4")


@pytest.mark.parametrize(
    "names", [["blend-x2"], ["model-x4"], ["repeat-x4", "blend-x2"], ["blend-x2", "lanczos-x2", "blend-x2"]]
)
def test_the_file_holds_what_the_post_processors_make_of_the_whole_video(tmp_path, names):
    frames, record = run(tmp_path, *names, num_chunk=4)
    chain = postprocessors(names)
    expected = chain.setup().run(generated(4), Fraction(16), seed=3)
    fps = chain.output_fps(Fraction(16))
    assert np.array_equal(frames, in_a_file(expected, tmp_path, fps))
    height, width = chain.output_size(32, 48)
    assert {key: record["output"][key] for key in ("frames", "fps", "height", "width")} == {
        "frames": len(expected), "fps": str(fps), "height": height, "width": width,
    }  # fmt: skip
    assert record["config"]["postprocess"] == [stage["name"] for stage in record["postprocess"]] == names
    assert record["timings"]["postprocess_fps"] > 0


def test_four_times_the_size_by_a_streaming_model_and_its_weights_are_on_record(tmp_path):
    frames, record = run(tmp_path, "model-x4", num_chunk=2)
    assert frames.shape == (9, 128, 192, 3)
    assert "postprocess.model-x4.transformer.0" in record["checkpoint"]
    timings = record["timings"]
    assert timings["time_to_first_frame_s"] > timings["chunk_p50_s"], "nothing was in the file before the end"


@pytest.mark.parametrize(
    ("length", "generates"), [({"num_frames": 30}, 17), ({"num_frames": 34}, 17), ({"num_frames": 35}, 25),
                              ({"duration": 1.0}, 17), ({"num_chunk": 2}, 9), ({}, 17)],
)  # fmt: skip
def test_a_length_in_frames_is_that_of_the_file_and_one_in_seconds_stays(length, generates):
    plan = Runner(derive_config(RUNNER, seed=0, postprocess=("blend-x2",), **length)).plan()
    assert plan.pipeline.frames_until(plan.framing.num_chunk) == generates


def test_the_size_flags_and_the_frame_rate_are_those_of_the_model(tmp_path):
    frames, record = run(tmp_path, "blend-x2", "lanczos-x2", num_chunk=1, height=16, width=32, fps="12")
    assert frames.shape == (2, 32, 64, 3) and record["output"]["fps"] == "24"
    assert (record["config"]["height"], record["config"]["width"], record["config"]["fps"]) == (16, 32, "12")


def test_a_replay_repeats_it_bit_for_bit(tmp_path):
    frames, _ = run(tmp_path, "model-x4", "blend-x2", num_chunk=3)
    again = read_record(tmp_path / "a.json").apply(RUNNER).setup().run()
    assert np.array_equal(read_video_frames(again), frames)


def test_without_post_processors_nothing_is_said_of_them(tmp_path):
    frames, record = run(tmp_path, num_chunk=2)
    assert np.array_equal(frames, in_a_file(generated(2), tmp_path))
    assert record["postprocess"] == [] and "postprocess_fps" not in record["timings"]


def test_when_the_model_fails_what_it_had_made_is_post_processed_and_kept(tmp_path, monkeypatch):
    real = Rollout._generate

    def fails(self, cache):
        if cache.autoregressive_index == 2 and self.pipeline.config.name == "template":
            raise RuntimeError("the model is broken")
        return real(self, cache)

    expected = postprocessors(["model-x4"]).setup().run(generated(2), Fraction(16), seed=3)
    monkeypatch.setattr(Rollout, "_generate", fails)
    with pytest.raises(RuntimeError, match="the model is broken"):
        run(tmp_path, "model-x4", num_chunk=4)
    assert np.array_equal(read_video_frames(tmp_path / "a.mp4"), in_a_file(expected, tmp_path))
    record = json.loads((tmp_path / "a.json").read_text())
    assert record["output"]["interrupted"] and record["output"]["frames"] == 9


def test_when_a_post_processor_fails_what_it_had_made_is_kept(tmp_path):
    with pytest.raises(RuntimeError, match="the post-processor is broken"):
        run(tmp_path, "breaks", num_chunk=4)
    assert np.array_equal(read_video_frames(tmp_path / "a.mp4"), in_a_file(generated(4)[:9], tmp_path))
    assert json.loads((tmp_path / "a.json").read_text())["output"]["frames"] == 9


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["blend-x3"], "there is no post-processor 'blend-x3'; did you mean 'blend-x2'"),
        (["repeat-x1", ""], "there is no post-processor ''"),
    ],
)
def test_an_unknown_name_is_refused_before_any_work_with_the_nearest(tmp_path, names, message):
    with pytest.raises(UserError, match=message):
        run(tmp_path, *names)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def interruptible():
    """As a program in the foreground is: one that a shell started behind itself ignores the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_signal_waits_for_the_end_of_a_piece_of_work_and_a_second_does_not(capsys, interruptible):
    done = []

    def work(signals: int) -> None:
        with interrupt_later():
            for _ in range(signals):
                signal.raise_signal(signal.SIGINT)
            done.append(signals)

    for signals in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            work(signals)
    assert done == [1]
    assert capsys.readouterr().err.count("once more stops at once") == 2
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_that_is_ignored_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupt_later():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
