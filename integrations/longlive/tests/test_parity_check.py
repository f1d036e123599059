"""The comparison with the original: its command line and what is its own in it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

import parity

pytestmark = pytest.mark.ci_cpu


@pytest.fixture
def script():
    path = Path(__file__).parent / "parity_check/run.py"
    spec = importlib.util.spec_from_file_location("longlive_parity", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_comparison_of_made_up_frames(script) -> None:
    frames = torch.randint(0, 200, (2, 4, 6, 3), dtype=torch.uint8)
    report = script.parity.compare(frames, frames + 51)
    assert report["mean"] == pytest.approx(0.2)
    assert script.parity.verdict(report, script.parity.THRESHOLD) == 1
    assert script.parity.verdict(script.parity.compare(frames, frames), 0) == 0


def test_the_lora_is_merged_as_written_out(script) -> None:
    base = {"model.blocks.0.ffn.0.weight": torch.randn(5, 3), "model.head.head.bias": torch.randn(2)}
    down, up = torch.randn(2, 3), torch.randn(5, 2)
    name = "base_model.model.blocks.0.ffn.0"
    lora = {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}
    out = parity.merged_lora(base, lora)
    torch.testing.assert_close(out["model.blocks.0.ffn.0.weight"], base["model.blocks.0.ffn.0.weight"] + up @ down)
    assert torch.equal(out["model.head.head.bias"], base["model.head.head.bias"])
    with pytest.raises(SystemExit, match="expected all"):
        parity.merged_lora(base, lora | {"something.else": down})


def test_the_command_line_names_both_files(script) -> None:
    words = "ours --base b.pt --lora l.pt --reference r.safetensors".split()
    assert script.parser().parse_args(words).threshold == parity.THRESHOLD
