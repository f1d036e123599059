"""The comparison with the original: its command line, its input for the original, its second step on a small model."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import imageio.v3 as imageio
import pytest
import torch

import parity
from flashdreams.core.controls import Control, Frame
from flashdreams.core.noise import GivenNoise
from flashvsr._encoder import enlarge
from small_flashvsr import shrunk

pytestmark = pytest.mark.ci_cpu

SCRIPT = Path(__file__).parent / "parity_check/run.py"
SMALL = torch.randint(0, 256, (21, 32, 64, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
RUNNER = shrunk(window=(2, 2, 2), local_range=3, sparse_ratio=0.01)


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("flashvsr_parity", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_ours_repeats_a_recorded_run(script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The second step on a small model, with a made-up reference: frames of our own with the noise it holds."""
    monkeypatch.setattr("flashvsr.config.FLASHVSR_CONFIGS", {"flashvsr-v1.0-x4": RUNNER})
    monkeypatch.setattr(script, "device", lambda: "cpu")
    network = RUNNER.pipeline.diffusion_model.transformer.network
    noise, small = torch.randn(1, 16, 6, 4, 8), SMALL[:, :8, :16].contiguous()
    controls = [Control(frame=Frame(frame.numpy())) for frame in small]
    options = {"noise": GivenNoise(noise), "num_frames": 21, "height": 32, "width": 64}
    (chunk,) = RUNNER.pipeline.setup().rollout(control=controls, **options)
    about = {"sparse_ratio": network.sparse_ratio, "local_range": network.local_range}
    tensors = {"small": small, "noise": noise, "frames": chunk.frames}
    words = ["ours", "--reference", str(tmp_path / "ref.safetensors"), "--weights", str(tmp_path), "--dtype", "float32"]
    parity.save_reference(tmp_path / "ref.safetensors", tensors, **about)
    assert script.main([*words, "--threshold", "0"]) == 0
    parity.save_reference(tmp_path / "ref.safetensors", tensors | {"noise": -noise}, **about)
    assert script.main([*words, "--threshold", "0"]) == 1


def test_the_original_is_given_what_ours_makes_of_the_frames(script) -> None:
    theirs = script.as_the_original_takes_it(SMALL)
    assert theirs.shape == (1, 3, 25, 128, 256)
    levels = (theirs[0].transpose(0, 1)[:21] + 1) * 127.5
    assert (enlarge(SMALL.permute(0, 3, 1, 2), 128, 256).float() - levels).abs().max() <= 1.01


def test_a_video_is_cut_to_what_the_original_loses_nothing_of(script, tmp_path: Path) -> None:
    imageio.imwrite(tmp_path / "clip.mp4", SMALL.repeat(2, 2, 1, 1)[:30, :50].numpy(), fps=16, macro_block_size=1)
    assert script.read_small(tmp_path / "clip.mp4", 29).shape == (29, 32, 64, 3)
    with pytest.raises(SystemExit, match="has 30 frames; 37 are asked for"):
        script.read_small(tmp_path / "clip.mp4", 37)
    words = ["original", "--repo", "x", "--video", "clip.mp4", "--out", "y", "--frames", "30"]
    with pytest.raises(SystemExit, match="--frames is 30; expected 21, 29, 37"):
        script.main(words)
