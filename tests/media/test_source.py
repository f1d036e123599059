"""Videos people give: frames, sizes and times as they are in the file, not as its header guesses."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from flashdreams.core.media import MediaError
from flashdreams.core.media.source import open_video
from flashdreams.core.media.video import VideoWriter, read_video_frames

pytestmark = pytest.mark.ci_cpu


def write(path: Path, frames: np.ndarray, fps: Fraction = Fraction(24)) -> Path:
    with VideoWriter(path, fps, *frames.shape[1:3]) as writer:
        writer.write(frames)
    return path


def write_times(path: Path, times: Iterable[int], tick: Fraction, codec: str = "mpeg4") -> Path:
    """A grey frame at each time, in ticks."""
    with av.open(str(path), "w") as out:
        stream = out.add_stream(codec, rate=24, width=32, height=32, pix_fmt="yuv420p")
        stream.time_base = stream.codec_context.time_base = tick
        for time in times:
            frame = av.VideoFrame.from_ndarray(np.full((32, 32, 3), 90, np.uint8), "rgb24")
            frame.pts, frame.time_base = time, tick
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    return path


@pytest.mark.parametrize("most", [1, 4, 7, 100])
def test_every_frame_is_read_once_in_order(tmp_path, moving_picture, most):
    path = write(tmp_path / "a.mp4", moving_picture(7, 30, 46))
    source = open_video(path)
    assert (source.height, source.width, source.frames, source.fps) == (30, 46, 7, 24)
    pieces = list(source.read(most))
    assert [len(piece) for piece in pieces] == [min(most, 7 - start) for start in range(0, 7, most)]
    assert np.array_equal(np.concatenate(pieces), read_video_frames(path))


def test_b06_colours_of_a_444_file_of_odd_size_are_whole(cases):
    path = cases / "B06" / "odd_97x61_22frames_audio.mp4"
    assert np.array_equal(np.concatenate(list(open_video(path).read(8))), read_video_frames(path))


@pytest.mark.parametrize("fps", ["24", "30000/1001", "2997/125", "0.5", "120"])
def test_an_even_rate_is_taken_exactly(tmp_path, moving_picture, capsys, fps):
    path = write(tmp_path / "a.mp4", moving_picture(5, 16, 16), Fraction(fps))
    assert open_video(path).fps == Fraction(fps)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("rate", [24, 30, 60, 120, Fraction(30000, 1001)])
def test_times_rounded_to_milliseconds_are_even(tmp_path, capsys, rate):
    times = [round(i * 1000 / rate) for i in range(50)]
    source = open_video(write_times(tmp_path / "a.mkv", times, Fraction(1, 1000)))
    assert abs(source.frames / source.fps - 50 / Fraction(rate)) <= Fraction(2, 1000)
    assert capsys.readouterr().err == ""


def test_an_uneven_rate_becomes_an_even_one_of_the_same_length_and_is_said(tmp_path, capsys):
    path = write_times(tmp_path / "a.mkv", [0, 40, 80, 200, 400], Fraction(1, 1000))
    source = open_video(path)
    with av.open(str(path)) as container:
        *_, last = container.decode(video=0)
    assert source.frames / source.fps == Fraction(400 + last.duration, 1000)
    assert "variable frame rate (steps of 40 to 200 ms); its 5 frames are spaced evenly" in capsys.readouterr().err


def test_a_video_that_begins_late_says_when(tmp_path):
    source = open_video(write_times(tmp_path / "a.mkv", [500, 540, 580], Fraction(1, 1000)))
    assert (source.start, source.frames, source.fps) == (Fraction(1, 2), 3, 25)


@pytest.mark.parametrize(
    ("matrix", "turns"), [((0, 1, -1, 0), 3), ((-1, 0, 0, -1), 2), ((0, -1, 1, 0), 1), ((1, 0, 0, 1), 0)]
)
def test_a_phone_that_was_held_upright_is_turned_as_players_do(tmp_path, moving_picture, matrix, turns):
    path = write(tmp_path / "a.mp4", moving_picture(3, 32, 64))
    plain = read_video_frames(path)
    box = lambda a, b, c, d: struct.pack(">9i", a << 16, b << 16, 0, c << 16, d << 16, 0, 0, 0, 1 << 30)  # noqa: E731
    data, identity = path.read_bytes(), box(1, 0, 0, 1)
    track = data.index(identity, data.index(b"tkhd"))
    path.write_bytes(data[:track] + box(*matrix) + data[track + len(identity) :])
    source = open_video(path)
    assert (source.height, source.width) == ((64, 32) if turns % 2 else (32, 64))
    # x' = a x + c y and y' = b x + d y: (0, 1, -1, 0) takes what is on the right to below, a turn with the clock
    assert np.array_equal(np.concatenate(list(source.read(8))), np.rot90(plain, turns, axes=(1, 2)))


def test_a_change_of_size_within_a_video_is_refused(tmp_path, moving_picture):
    path, data = tmp_path / "a.ts", b""
    for height, width in ((32, 48), (48, 32)):
        with av.open(str(path), "w") as out:
            stream = out.add_stream("mpeg2video", rate=25, width=width, height=height, pix_fmt="yuv420p")
            for picture in moving_picture(4, height, width):
                out.mux(stream.encode(av.VideoFrame.from_ndarray(picture, "rgb24")))
            out.mux(stream.encode(None))
        data += path.read_bytes()
    path.write_bytes(data)
    with pytest.raises(MediaError, match=r"changes from 32x48 to 48x32 \(height x width\) at frame \d; convert"):
        open_video(path)


@pytest.mark.parametrize(
    ("data", "message"),
    [(None, "does not exist or is not a file"), (b"", "cannot be read"), (b"no video" * 99, "cannot be read")],
)
def test_what_is_no_video_is_refused_in_a_sentence(tmp_path, data, message):
    if data is not None:
        (tmp_path / "a.mp4").write_bytes(data)
    with pytest.raises(MediaError, match=message):
        open_video(tmp_path / "a.mp4")


def test_sound_alone_is_no_video(tmp_path):
    with av.open(str(tmp_path / "a.wav"), "w") as out:
        stream = out.add_stream("pcm_s16le", rate=8000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), "s16", "mono")
        frame.sample_rate = 8000
        out.mux([*stream.encode(frame), *stream.encode(None)])
    with pytest.raises(MediaError, match="has no picture in it; give a video file"):
        open_video(tmp_path / "a.wav")


def test_a_file_that_changed_while_it_was_used_is_noticed(tmp_path, moving_picture):
    source = open_video(write(tmp_path / "a.mp4", moving_picture(5, 16, 16)))
    write(tmp_path / "a.mp4", moving_picture(3, 16, 16))
    with pytest.raises(MediaError, match="had 5 frames and now has 3: it was changed"):
        list(source.read(2))
