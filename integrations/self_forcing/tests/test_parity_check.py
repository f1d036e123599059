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
