"""What is left of a video when its process is killed, interrupted, or runs out of disk."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import av
import numpy as np
import pytest

from flashdreams.core.media.video import read_video_frames

pytestmark = pytest.mark.ci_cpu

CHUNK = 3
WRITE_WITHOUT_END = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits that it is ignored
import numpy as np
from fractions import Fraction
from flashdreams.core.media.video import VideoWriter
def frames(chunk):
    return np.stack([np.full((48, 64, 3), 40 * (3 * chunk + i) % 240, dtype=np.uint8) for i in range(3)])
with VideoWriter(sys.argv[1], Fraction(16), 48, 64) as writer:
    for chunk in range(100_000):
        writer.write(frames(chunk))
        print(chunk + 1, flush=True)
"""


def start_and_stop_after(chunks: int, how: signal.Signals, path: Path) -> tuple[int, int, str]:
    """Run a writer, send it ``how`` after it wrote ``chunks``; returns chunks it wrote, its exit status and stderr."""
    command = [sys.executable, "-c", WRITE_WITHOUT_END, str(path)]
    written = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            written = int(line)
            if written == chunks:
                process.send_signal(how)
        errors = process.stderr.read()
    return written, process.returncode, errors


def levels(path: Path) -> np.ndarray:
    return read_video_frames(path).mean((1, 2, 3))


def expected(count: int) -> np.ndarray:
    return 40.0 * np.arange(count) % 240


@pytest.mark.parametrize("chunks", [1, 7])
def test_after_kill_9_the_file_plays_up_to_the_last_written_chunk(tmp_path, chunks):
    path = tmp_path / "clip.mp4"
    written, status, _ = start_and_stop_after(chunks, signal.SIGKILL, path)
    assert status == -signal.SIGKILL
    shown = levels(path)
    assert len(shown) >= CHUNK * written
    assert np.abs(shown - expected(len(shown))).max() < 3


def test_after_ctrl_c_the_file_is_finished(tmp_path):
    path = tmp_path / "clip.mp4"
    written, status, errors = start_and_stop_after(7, signal.SIGINT, path)
    assert status != 0 and "KeyboardInterrupt" in errors
    with av.open(str(path)) as container:
        assert container.streams.video[0].frames >= CHUNK * written  # an index of all frames: no fragments any more
    assert b"moof" not in path.read_bytes()
    shown = levels(path)
    assert np.abs(shown - expected(len(shown))).max() < 3
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_said_and_keeps_what_was_written(tmp_path):
    script = """
import resource, sys
import numpy as np
from fractions import Fraction
from flashdreams.core.media import MediaError
from flashdreams.core.media.video import VideoWriter
noise = np.random.default_rng(0).integers(0, 256, (2, 48, 64, 3), dtype=np.uint8)
resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))
writer = VideoWriter(sys.argv[1], Fraction(16), 48, 64)
try:
    while True:
        writer.write(noise)
except MediaError as error:
    print(error)
try:
    writer.write(noise)
except MediaError as error:
    print(error)
print(writer.num_frames)
writer.close()

resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
try:
    with VideoWriter(sys.argv[2], Fraction(16), 48, 64) as writer:
        writer.write(noise)
except MediaError as error:
    print(error)
"""
    path = tmp_path / "clip.mp4"
    second = tmp_path / "new" / "clip.mp4"
    command = [sys.executable, "-c", script, str(path), str(second)]
    full, after, frames, at_once = subprocess.run(
        command, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert repr(str(path)) in full and f"cannot grow beyond {frames} frames" in full
    assert "a write to it failed" in after
    assert int(frames) > 2
    assert len(read_video_frames(path)) == int(frames)
    assert repr(str(second)) in at_once and "cannot grow beyond 0 frames" in at_once
    assert list(tmp_path.iterdir()) == [path]
