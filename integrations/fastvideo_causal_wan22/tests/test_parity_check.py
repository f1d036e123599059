"""The comparison with the original: its command line and what is its own in it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from fastvideo_causal_wan22.config import RUNNER_FASTVIDEO_CAUSAL_WAN22_I2V_A14B
from flashdreams.config import derive_config
from member import prompt, shrunk

pytestmark = pytest.mark.ci_cpu


@pytest.fixture
def script():
    path = Path(__file__).parent / "parity_check/run.py"
    spec = importlib.util.spec_from_file_location("fastvideo_parity", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_start_noise_and_draws_are_told_apart_in_either_order_of_axes(script) -> None:
    start = torch.randn(1, 16, 9, 4, 6)
    draws = [torch.randn(1, 3, 16, 4, 6) for _ in range(2)]
    split = script.split_draws([torch.randn(2, 2, 2, 2), start, *draws])
    assert torch.equal(split["noise"], start[0].transpose(0, 1))
    assert torch.equal(split["draw0000"], draws[0][0]) and torch.equal(split["draw0001"], draws[1][0])
    with pytest.raises(SystemExit, match="none of 1 draws is a latent"):
        script.split_draws([torch.randn(2, 2, 2, 2)])


def test_sharing_the_cross_attention_changes_what_the_low_noise_expert_makes(script) -> None:
    """The quirk that the check repeats: not a copy of no consequence."""
    base = shrunk(RUNNER_FASTVIDEO_CAUSAL_WAN22_I2V_A14B).pipeline
    pipeline = derive_config(base, decoder=None, height=4, width=6).setup()
    for parameter in pipeline.diffusion_model.experts[0].parameters():
        parameter.mul_(1.5)
    rollouts = [pipeline.rollout(conditions=prompt(), seed=1, num_chunk=1) for _ in range(2)]
    script.share_cross_attention(rollouts[1].cache.experts)
    ours, theirs = (next(rollout).latent for rollout in rollouts)
    assert not torch.allclose(ours, theirs, atol=1e-4)


def test_the_recorder_keeps_the_draws_of_another_process(tmp_path: Path) -> None:
    import os
    import subprocess
    import sys

    record = Path(__file__).parent / "parity_check/record"
    environment = os.environ | {"PYTHONPATH": str(record), "RECORD": str(tmp_path / "draws")}
    code = (
        "import torch; torch.manual_seed(0); torch.randn(3); torch.randn(1, 16, 2, 3, 4); torch.randn(1, 2, 16, 3, 4)"
    )
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    files = sorted((tmp_path / "draws").glob("*.pt"))
    assert [torch.load(file).shape for file in files] == [(1, 16, 2, 3, 4), (1, 2, 16, 3, 4)]
