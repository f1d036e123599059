"""A slug that works on a video file: case B06, what is refused, and what is kept of the sound."""

from __future__ import annotations

import json
import shutil
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from flashdreams.config import derive_config
from flashdreams.core.media.video import read_video_frames
from flashdreams.infra.errors import UserError
from flashdreams.infra.postprocess.pipeline import PipelinePostprocessor
from flashdreams.scripts.recording import read_record
from video_model import RUNNER_VIDEO

pytestmark = pytest.mark.ci_cpu

B06 = Path(__file__).parents[1] / "cases" / "B06"


def run(path: Path, output: Path, **fields) -> Path:
    return derive_config(RUNNER_VIDEO, video=path, output=output, seed=1, **fields).setup().run()


def columns(frames: np.ndarray) -> np.ndarray:
    """Where the white column of each frame stands, as a part of the width."""
    profile = frames.astype(float).mean((1, 3))
    bright = profile > (profile.max(1, keepdims=True) + profile.min(1, keepdims=True)) / 2
    return np.array([row.nonzero()[0].mean() + 0.5 for row in bright]) / frames.shape[2]


def seconds(path: Path) -> Fraction:
    """Until the end of the last frame."""
    with av.open(str(path)) as container:
        packets = [p for p in container.demux(container.streams.video[0]) if p.pts is not None]
        return max((p.pts + p.duration) * p.time_base for p in packets)


def sound(path: Path) -> np.ndarray:
    with av.open(str(path)) as container:
        return np.concatenate([frame.to_ndarray() for frame in container.decode(audio=0)], axis=1)


@pytest.mark.parametrize(
    ("name", "frames", "height", "width"),
    [
        ("odd_97x61_22frames_audio", 22, 61, 97),
        ("clip_1frames_64x48", 1, 48, 64),
        ("clip_8frames_64x48", 8, 48, 64),
        ("clip_9frames_64x48", 9, 48, 64),
        ("variable_rate_15frames", 15, 48, 64),
    ],
)
def test_b06_every_frame_in_order_four_times_the_size_and_as_long(tmp_path, capsys, name, frames, height, width):
    source = B06 / f"{name}.mp4"
    out = run(source, tmp_path / "a.mp4")
    made, given = read_video_frames(out), read_video_frames(source)
    assert made.shape == (frames, 4 * height, 4 * width, 3) and len(given) == frames
    if frames > 1:
        assert np.abs(columns(made) - columns(given)).max() < 1 / width
        assert (np.diff(columns(made)) > 0).all()
    assert seconds(out) == seconds(source)
    said = capsys.readouterr().err
    assert said.count("variable frame rate") == (name.startswith("variable"))
    assert "odd" not in said and "sound" not in said
    record = json.loads((tmp_path / "a.json").read_text())
    assert (record["output"]["frames"], record["output"]["interrupted"]) == (frames, False)
    assert record["inputs"]["video"].startswith("sha256:")


def test_b06_the_sound_is_that_of_the_file_to_the_bit(tmp_path):
    source = B06 / "odd_97x61_22frames_audio.mp4"
    assert np.array_equal(sound(run(source, tmp_path / "a.mp4")), sound(source))


def test_post_processors_follow_the_model_and_the_sound_stays(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHDREAMS_POSTPROCESSORS", "blend=video_model:POSTPROCESSORS")
    source = B06 / "odd_97x61_22frames_audio.mp4"
    out = run(source, tmp_path / "a.mp4", postprocess=("blend",))
    assert read_video_frames(out).shape == (44, 244, 388, 3)
    assert seconds(out) == seconds(source) and np.array_equal(sound(out), sound(source))


def test_an_odd_product_is_made_even_once_and_said(tmp_path, capsys):
    out = run(B06 / "odd_97x61_22frames_audio.mp4", tmp_path / "a.mp4", scale=1, pipeline={"encoder": {"scale": 1}})
    assert read_video_frames(out).shape == (22, 62, 98, 3)
    assert capsys.readouterr().err.count("is odd") == 1


def test_sound_that_an_mp4_cannot_hold_is_left_out_and_said(tmp_path, capsys):
    path = tmp_path / "old.mkv"
    with av.open(str(path), "w") as out:
        video = out.add_stream("mpeg4", rate=12, width=64, height=48, pix_fmt="yuv420p")
        audio = out.add_stream("pcm_s16le", rate=44100, layout="stereo")
        silence = av.AudioFrame.from_ndarray(np.zeros((2, 4096), np.float32), "fltp", "stereo")
        silence.sample_rate, silence.pts = 44100, 0
        out.mux([*audio.encode(silence), *audio.encode(None)])
        for i in range(8):
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), 20 * i, np.uint8), "rgb24")
            frame.pts, frame.time_base = i, Fraction(1, 12)
            out.mux(video.encode(frame))
        out.mux(video.encode(None))
    made = run(path, tmp_path / "a.mp4")
    assert len(read_video_frames(made)) == 8
    assert capsys.readouterr().err.count("sound (pcm_s16le) could not be copied into an mp4") == 1


def test_a_replay_repeats_it_bit_for_bit(tmp_path):
    first = run(B06 / "clip_9frames_64x48.mp4", tmp_path / "a.mp4")
    again = read_record(tmp_path / "a.json").apply(RUNNER_VIDEO).setup().run()
    assert again.name == "a-replay.mp4"
    assert np.array_equal(read_video_frames(again), read_video_frames(first))


def test_what_was_made_is_kept_with_its_part_of_the_sound_when_an_error_comes(tmp_path, monkeypatch):
    source, real = B06 / "odd_97x61_22frames_audio.mp4", PipelinePostprocessor._next

    def fails(self, state):
        if state.chunks == 1:
            raise RuntimeError("out of memory")
        return real(self, state)

    monkeypatch.setattr(PipelinePostprocessor, "_next", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        run(source, tmp_path / "a.mp4")
    made, whole = sound(tmp_path / "a.mp4"), sound(source)
    assert len(read_video_frames(tmp_path / "a.mp4")) == 21
    assert 44100 * 21 / 12 - 1024 < made.shape[1] < 44100 * 21 / 12 + 2 * 1024 < whole.shape[1] + 1024
    assert made.shape[1] < whole.shape[1]
    record = json.loads((tmp_path / "a.json").read_text())
    assert (record["output"]["frames"], record["output"]["interrupted"]) == (21, True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"video": None}, r"works on a video file; give one \(--video FILE\)"),
        ({"prompt": "a cat"}, "takes no --prompt: it is made from a video alone; leave it out"),
        ({"num_chunk": 3}, "takes no --num-chunk: the video is as long as the file"),
        ({"height": 64}, "takes no --height: the size is that of the file"),
        ({"fps": "24"}, "takes no --fps: the frame rate is the file's"),
        ({"control": "left"}, "takes no --control"),
        ({"image": Path("a.png")}, "takes no --image"),
        ({"video": Path("no.mp4")}, "'no.mp4' does not exist"),
        ({"postprocess": ("nothing-x2",)}, "there is no post-processor 'nothing-x2'"),
    ],
)
def test_flags_that_mean_nothing_here_are_refused_in_a_sentence(tmp_path, fields, message):
    fields = {"video": B06 / "clip_1frames_64x48.mp4", "output": tmp_path / "a.mp4"} | fields
    with pytest.raises(UserError, match=message):
        derive_config(RUNNER_VIDEO, **fields).setup().run()
    assert not list(tmp_path.iterdir())


def test_the_file_that_is_read_is_not_written_over(tmp_path):
    path = shutil.copy(B06 / "clip_8frames_64x48.mp4", tmp_path / "a.mp4")
    with pytest.raises(UserError, match="is the video that is to be read; give another name"):
        run(path, tmp_path / "." / "a.mp4")
    assert len(read_video_frames(path)) == 8
