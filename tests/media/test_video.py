"""The mp4 writer: exact rate and duration (B05), colours, sizes, checks before any work, constant memory."""

from __future__ import annotations

import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from flashdreams.core.media import MediaError
from flashdreams.core.media.fps import parse_fps
from flashdreams.core.media.video import VideoWriter, read_video_frames

pytestmark = pytest.mark.ci_cpu


def boxes(path: Path) -> list[str]:
    """Names of the top-level boxes of an mp4, in order."""
    data, names = path.read_bytes(), []
    while data:
        names.append(data[4:8].decode())
        data = data[int.from_bytes(data[:4], "big") :]
    return names


@pytest.mark.parametrize(
    "text", ["23.976", "29.97", "59.94", "30000/1001", "72.004", "12.5", "0.5", "1", "240", "999.999999"]
)
@pytest.mark.parametrize("per_write", [1, 5])
def test_rate_and_duration_are_those_asked_for(tmp_path, moving_picture, text, per_write):
    fps, count = parse_fps(text), 15
    with VideoWriter(tmp_path / "clip.mp4", fps, 32, 32) as writer:
        for start in range(0, count, per_write):
            writer.write(moving_picture(per_write, 32, 32, start))
    with av.open(str(tmp_path / "clip.mp4")) as container:
        stream = container.streams.video[0]
        assert stream.frames == count
        assert abs(stream.average_rate / fps - 1) < 1e-4
        assert abs(stream.duration * stream.time_base * fps - count) < 1e-3
        times = [frame.pts * stream.time_base for frame in container.decode(stream)]
    assert all(abs(time * fps - index) < 1e-3 for index, time in enumerate(times))


@pytest.mark.parametrize(("height", "width"), [(128, 128), (48, 80), (480, 576)])
def test_frames_come_back_in_order_and_nearly_unchanged(tmp_path, moving_picture, height, width):
    chunks = [moving_picture(count, height, width, start) for count, start in ((1, 0), (4, 1), (3, 5))]
    with VideoWriter(tmp_path / "clip.mp4", Fraction(16), height, width) as writer:
        for chunk in chunks:
            writer.write(chunk)
    given = np.concatenate(chunks).astype(int)
    read = read_video_frames(tmp_path / "clip.mp4").astype(int)
    assert read.shape == given.shape
    assert np.abs(read - given).mean() < 1.5
    thin = slice(None), slice(None, None, 4), slice(None, None, 4)
    distances = np.abs(read[thin][:, None] - given[thin][None]).mean((2, 3, 4))
    assert distances.argmin(1).tolist() == list(range(8))


def test_flat_colours_keep_their_value(tmp_path):
    colours = np.random.default_rng(0).integers(0, 256, (24, 1, 1, 3), dtype=np.uint8)
    given = np.broadcast_to(colours, (24, 32, 32, 3))
    with VideoWriter(tmp_path / "clip.mp4", Fraction(16), 32, 32) as writer:
        writer.write(given)
    error = read_video_frames(tmp_path / "clip.mp4").astype(int) - given
    assert np.abs(error).max() <= 6
    assert np.abs(error.mean((0, 1, 2))).max() < 0.75  # a wrong matrix or range, or truncation, would be a bias


@pytest.mark.parametrize("finished", [False, True])
def test_stream_is_yuv420p_and_says_bt709(tmp_path, moving_picture, finished):
    path = tmp_path / "clip.mp4"
    writer = VideoWriter(path, Fraction(16), 64, 96)
    writer.write(moving_picture(3))
    if finished:
        writer.close()
    with av.open(str(path)) as container:
        context = container.streams.video[0].codec_context
        tags = (context.color_primaries, context.color_trc, context.colorspace, context.color_range)
        assert (context.name, context.pix_fmt) == ("h264", "yuv420p")
    assert tags == (1, 1, 1, 1)  # BT.709 three times, limited range
    assert b"colrnclx" in path.read_bytes()  # the container says so as well: players read either
    writer.close()


@pytest.mark.parametrize(("height", "width"), [(61, 97), (64, 97), (61, 96), (1, 1), (2, 600)])
def test_odd_sizes_repeat_the_edge_by_one_pixel_and_say_so(tmp_path, moving_picture, capsys, height, width):
    given = moving_picture(4, height, width)
    for _ in range(2):
        with VideoWriter(tmp_path / "clip.mp4", Fraction(16), height, width) as writer:
            writer.write(given)
    read = read_video_frames(tmp_path / "clip.mp4").astype(int)
    even = (height + height % 2, width + width % 2)
    assert read.shape == (4, *even, 3)
    padded = np.pad(given, ((0, 0), (0, even[0] - height), (0, even[1] - width), (0, 0)), mode="edge")
    assert np.abs(read - padded).mean() < 2
    said = capsys.readouterr().err
    odd = height % 2 or width % 2
    assert said.count("\n") == (1 if odd else 0)
    assert not odd or (f"{height}x{width}" in said and f"{even[0]}x{even[1]}" in said)


def test_while_written_the_file_holds_every_frame_and_at_close_its_index_moves_to_the_front(tmp_path, moving_picture):
    path = tmp_path / "clip.mp4"
    writer = VideoWriter(path, Fraction(16), 64, 96)
    for chunk in range(3):
        writer.write(moving_picture(4, start=4 * chunk))
        assert len(read_video_frames(path)) == 4 * (chunk + 1) == writer.num_frames
        assert boxes(path) == ["ftyp", "moov"] + ["moof", "mdat"] * (chunk + 1)
    before = read_video_frames(path)
    writer.close()
    assert [name for name in boxes(path) if name != "free"] == ["ftyp", "moov", "mdat"]
    assert np.array_equal(read_video_frames(path), before)
    assert list(tmp_path.iterdir()) == [path]


def test_a_failing_rewrite_keeps_the_fragmented_file_and_says_so(tmp_path, moving_picture, capsys):
    path = tmp_path / "clip.mp4"
    writer = VideoWriter(path, Fraction(16), 64, 96)
    writer.write(moving_picture(4))
    (tmp_path / ".clip.mp4.part").mkdir()  # where the copy would go
    writer.close()
    assert len(read_video_frames(path)) == 4
    assert "stays a fragmented mp4" in capsys.readouterr().err


def test_an_exception_in_the_block_leaves_a_finished_file(tmp_path, moving_picture):
    path = tmp_path / "clip.mp4"

    def generate() -> None:
        with VideoWriter(path, Fraction(16), 64, 96) as writer:
            writer.write(moving_picture(4))
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        generate()
    assert "moof" not in boxes(path)
    assert len(read_video_frames(path)) == 4


# Checks before any work.


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("folder", r"is a folder; name a file in it"),
        (".", r"is a folder"),
        ("clip.avi", r"does not end in .mp4"),
        ("clip", r"does not end in .mp4"),
        ("file/clip.mp4", r"Not a directory"),
        ("file/below/clip.mp4", r"Not a directory"),
        ("/proc/nowhere/clip.mp4", r"No such file"),
        ("/proc/clip.mp4", r"No such file"),
        ("x" * 300 + ".mp4", r"File name too long"),
        ("pipe.mp4", r"device or pipe"),
        ("nul\0.mp4", r"null byte"),
    ],
)
def test_a_place_that_cannot_hold_the_file_is_refused_before_any_frame(tmp_path, path, said):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("kept")
    os.mkfifo(tmp_path / "pipe.mp4")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(MediaError, match=said) as caught:
        VideoWriter(tmp_path / path, Fraction(16), 64, 96)
    assert repr(str(tmp_path / path)) in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize(("height", "width"), [(0, 64), (64, -2), (64, 40_000)])
def test_a_size_that_cannot_be_encoded_is_refused_before_any_frame(tmp_path, height, width):
    with pytest.raises(MediaError, match=f"{height}x{width}"):
        VideoWriter(tmp_path / "new" / "clip.mp4", Fraction(16), height, width)
    assert not list(tmp_path.iterdir())


def test_missing_folders_are_made_and_removed_again_if_no_frame_comes(tmp_path, moving_picture):
    path = tmp_path / "a" / "b" / "clip.mp4"
    VideoWriter(path, Fraction(16), 64, 96).close()
    assert not list(tmp_path.iterdir())
    with VideoWriter(path, Fraction(16), 64, 96) as writer:
        writer.write(moving_picture(2))
    assert len(read_video_frames(path)) == 2


def test_an_existing_file_is_kept_until_the_first_frame(tmp_path, moving_picture):
    path = tmp_path / "clip.mp4"
    path.write_text("an earlier video")
    with VideoWriter(path, Fraction(16), 64, 96) as writer:
        writer.write(moving_picture(1)[:0])
        assert path.read_text() == "an earlier video"
        writer.write(moving_picture(1))
    assert len(read_video_frames(path)) == 1


def test_a_link_is_written_through(tmp_path, moving_picture):
    (tmp_path / "link.mp4").symlink_to(tmp_path / "real.mp4")
    with VideoWriter(tmp_path / "link.mp4", Fraction(16), 64, 96) as writer:
        writer.write(moving_picture(2))
    assert (tmp_path / "link.mp4").is_symlink()
    assert len(read_video_frames(tmp_path / "real.mp4")) == 2


@pytest.mark.parametrize("shape", [(2, 64, 97, 3), (64, 96, 3), (2, 64, 96, 4), (2, 96, 64, 3)])
def test_frames_of_another_shape_are_refused(tmp_path, shape):
    with VideoWriter(tmp_path / "clip.mp4", Fraction(16), 64, 96) as writer:
        with pytest.raises(ValueError, match=r"expected uint8 \[T, 64, 96, 3\]"):
            writer.write(np.zeros(shape, dtype=np.uint8))
        with pytest.raises(ValueError, match="frames are float64"):
            writer.write(np.zeros((2, 64, 96, 3)))
    assert not list(tmp_path.iterdir())


def test_a_closed_writer_takes_no_frames(tmp_path, moving_picture):
    with VideoWriter(tmp_path / "clip.mp4", Fraction(16), 64, 96) as writer:
        writer.write(moving_picture(2))
    with pytest.raises(MediaError, match="closed"):
        writer.write(moving_picture(2))
    writer.close()


def test_memory_is_flat_over_two_thousand_writes(tmp_path):
    script = """
import sys, numpy as np, psutil
from fractions import Fraction
from flashdreams.core.media.video import VideoWriter
frames = np.random.default_rng(0).integers(0, 256, (8, 2, 64, 64, 3), dtype=np.uint8)
used = psutil.Process().memory_info
with VideoWriter(sys.argv[1], Fraction(16), 64, 64) as writer:
    for chunk in range(2000):
        writer.write(frames[chunk % 8])
        if chunk == 200:
            before = used().rss
    print(used().rss - before, writer.num_frames)
"""
    path = tmp_path / "clip.mp4"
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True)
    growth, frames = map(int, done.stdout.split())
    assert frames == 4000
    assert growth < 2_000_000 < path.stat().st_size  # the file is far larger than what memory grew by
