"""The comparison with the original: its command line, its measure, and its second step on a small model."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

import parity
from flashdreams.config import derive_config
from member import prompt, shrunk
from self_forcing.config import SELF_FORCING_CONFIGS

pytestmark = pytest.mark.ci_cpu

SCRIPT = Path(__file__).parent / "parity_check/run.py"


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("self_forcing_parity", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_equal_frames_have_no_difference_and_others_the_right_one() -> None:
    frames = torch.randint(0, 200, (3, 4, 6, 3), dtype=torch.uint8)
    assert parity.compare(frames, frames) == {
        "mean": 0, "worst_frame": 0, "worst_frame_number": 0, "first_frame": 0, "max": 0, "equal": 1,
    }  # fmt: skip
    other = frames.clone()
    other[1] += 51
    report = parity.compare(frames, other)
    assert report["mean"] == pytest.approx(0.2 / 3)
    assert (report["worst_frame_number"], report["first_frame"]) == (1, 0)
    assert report["worst_frame"] == report["max"] == pytest.approx(0.2)
    assert report["equal"] == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match="cannot compare"):
        parity.compare(frames, other[:2])


def test_the_verdict_depends_on_the_threshold(capsys: pytest.CaptureFixture[str]) -> None:
    report = parity.compare(torch.zeros(1, 2, 2, 3, dtype=torch.uint8), torch.full((1, 2, 2, 3), 51, dtype=torch.uint8))
    assert (parity.verdict(report, 0.3), parity.verdict(report, 0.1)) == (0, 1)
    assert "FAIL: mean |d|/255 is 0.20000, threshold 0.1" in capsys.readouterr().out


def test_draws_are_taken_in_the_order_in_which_the_original_makes_them() -> None:
    draws = [torch.full((3, 16, 4, 6), float(i)) for i in range(6)]
    by_step = parity.draws_by_step(draws, lambda chunk: 3)
    assert {key: value.mean().item() for key, value in by_step.items()} == {
        (0, 0): 0, (0, 1): 1, (0, 2): 2, (1, 0): 3, (1, 1): 4, (1, 2): 5,
    }  # fmt: skip
    assert by_step[1, 2].shape == (1, 16, 3, 4, 6)
    with pytest.raises(SystemExit, match="1 draws are left for chunk 1, which needs 3"):
        parity.draws_by_step(draws[:4], lambda chunk: 3)


def test_what_torch_draws_is_recorded() -> None:
    with parity.recorded("randn_like") as drawn:
        made = torch.randn_like(torch.zeros(4))
    torch.randn_like(torch.zeros(4))
    assert len(drawn) == 1 and torch.equal(drawn[0], made)


def test_ours_repeats_a_recorded_run(script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The second step on a small model, with a made-up reference: frames of our own with the noise it holds."""
    from flashdreams.core.noise import GivenNoise
    from self_forcing import config as module

    small = derive_config(shrunk(SELF_FORCING_CONFIGS["self-forcing-t2v-1.3b"]).pipeline, text_encoder=None)
    pipeline = small.setup()
    encode = lambda self, prompts, negative_prompt=None: prompt()  # noqa: E731
    monkeypatch.setattr(type(pipeline), "encode_prompts", encode)
    monkeypatch.setattr(module, "PIPELINE_SELF_FORCING_T2V_1_3B", small)
    monkeypatch.setattr(type(small), "setup", lambda self, device: pipeline)
    noise, draws = torch.randn(1, 6, 16, 4, 6), [torch.randn(3, 16, 4, 6) for _ in range(6)]
    given = GivenNoise(noise.transpose(1, 2), parity.draws_by_step(draws, lambda chunk: 3))
    frames = torch.cat([chunk.frames for chunk in pipeline.rollout("a cat", num_chunk=2, noise=given)])
    tensors = {"noise": noise, "frames": frames} | {f"draw{i:04d}": draw for i, draw in enumerate(draws)}
    parity.save_reference(tmp_path / "ref.safetensors", tensors, prompt="a cat")
    words = ["ours", "--reference", str(tmp_path / "ref.safetensors"), "--checkpoint", "x.pt"]
    assert script.main(words) == 0
    tensors["draw0004"] = -tensors["draw0004"]
    parity.save_reference(tmp_path / "ref.safetensors", tensors, prompt="a cat")
    assert script.main([*words, "--threshold", "0"]) == 1
