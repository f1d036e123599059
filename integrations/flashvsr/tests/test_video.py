"""On the command line: behind another model, and on video files of awkward lengths, sizes and rates (case B06)."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import torch

import small_flashvsr
from flashdreams.scripts.run import run

pytestmark = pytest.mark.ci_cpu

CASES = Path(__file__).parents[3] / "tests/cases/B06"


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHDREAMS_POSTPROCESSORS", "small-flashvsr=small_flashvsr:ALL")
    monkeypatch.setenv("FLASHDREAMS_RUNNER_CONFIGS", "small-flashvsr=small_flashvsr:RUNNER")


def decoded(path: Path) -> tuple[list[np.ndarray], list[Fraction], float]:
    """Frames, when each is shown, and the length in seconds to the end of the last."""
    with av.open(str(path)) as video:
        frames = list(video.decode(video=0))
        unit = video.streams.video[0].time_base
        length = float((frames[-1].pts + frames[-1].duration) * unit)
        return [frame.to_ndarray(format="rgb24") for frame in frames], [frame.pts * unit for frame in frames], length


def command(*words: str | Path) -> None:
    assert run([*map(str, words)], "flashdreams-run") == 0


def test_behind_tiny_world_the_video_is_four_times_as_large(tmp_path: Path) -> None:
    out = tmp_path / "large.mp4"
    flags = ["--num-chunk", "2", "--seed", "0", "--device", "cpu"]
    command("tiny-world", *flags, "--output", tmp_path / "plain.mp4")
    command("tiny-world", *flags, "--output", out, "--postprocess", "small-flashvsr")
    plain, times, _ = decoded(tmp_path / "plain.mp4")
    large, large_times, _ = decoded(out)
    assert [frame.shape for frame in plain] == [(128, 128, 3)] * 5
    assert [frame.shape for frame in large] == [(512, 512, 3)] * 5
    assert large_times == times
    record = json.loads(out.with_suffix(".json").read_text())
    assert (record["output"]["height"], record["output"]["width"]) == (512, 512)
    # The random model draws nonsense, but in the colours of the frame that it makes larger.
    for small, big in zip(plain, large, strict=True):
        assert np.abs(small.mean((0, 1)) - big.mean((0, 1))).max() < 25


@pytest.mark.parametrize(
    ("name", "frames", "size"),
    [
        ("odd_97x61_22frames_audio", 22, (244, 388)),
        ("clip_1frames_64x48", 1, (192, 256)),
        ("clip_8frames_64x48", 8, (192, 256)),
        ("clip_9frames_64x48", 9, (192, 256)),
        ("variable_rate_15frames", 15, (192, 256)),
    ],
)
def test_every_frame_comes_back_and_the_size_is_exactly_four_times(
    name: str, frames: int, size: tuple[int, int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """B06: neither 8n + 1 frames nor multiples of 128 are asked for; nothing is lost, added or moved."""
    source, out = CASES / f"{name}.mp4", tmp_path / "out.mp4"
    command("small-flashvsr", "--video", source, "--output", out, "--seed", "0", "--device", "cpu")
    given, _, seconds = decoded(source)
    made, _, made_seconds = decoded(out)
    assert len(given) == len(made) == frames
    assert {frame.shape[:2] for frame in made} == {size}
    assert made_seconds == pytest.approx(seconds, abs=0.05)
    with av.open(str(source)) as video, av.open(str(out)) as larger:
        had_sound = bool(video.streams.audio)
        assert bool(larger.streams.audio) == had_sound or "sound" in capfd.readouterr().err


def test_the_frames_are_in_order_and_in_their_places() -> None:
    """What comes out for a frame has its colours: the model is random, the correction by the frame is not."""
    model = small_flashvsr.ALL["small-flashvsr"].setup()
    levels = torch.arange(0, 230, 5, dtype=torch.uint8)
    clip = levels[:, None, None, None].expand(-1, 30, 40, 3).contiguous()
    made = model.run(clip)
    assert made.shape == (46, 120, 160, 3)
    assert (made.float().mean((1, 2, 3)) - levels).abs().max() < 3


def test_how_frames_are_handed_in_changes_nothing() -> None:
    model = small_flashvsr.ALL["small-flashvsr"].setup()
    clip = torch.randint(0, 256, (33, 20, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    state = model.open(20, 32, Fraction(16), seed=5)
    pieces = [model.push(piece, state) for piece in clip.split([1, 0, 24, 3, 5])]
    assert [len(piece) for piece in pieces] == [0, 0, 21, 0, 8], "with the 25th frame, and with the 33rd"
    assert torch.equal(torch.cat([*pieces, model.finish(state)]), model.run(clip, Fraction(16), seed=5))
