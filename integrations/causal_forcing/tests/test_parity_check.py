"""The comparison with the original: its command line and what is its own in it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.ci_cpu


@pytest.fixture
def script():
    path = Path(__file__).parent / "parity_check/run.py"
    spec = importlib.util.spec_from_file_location("causal_forcing_parity", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_comparison_of_made_up_frames(script) -> None:
    frames = torch.randint(0, 200, (2, 4, 6, 3), dtype=torch.uint8)
    report = script.parity.compare(frames, frames + 51)
    assert report["mean"] == pytest.approx(0.2)
    assert script.parity.verdict(report, script.parity.THRESHOLD) == 1
    assert script.parity.verdict(script.parity.compare(frames, frames), 0) == 0


def test_its_slugs_are_ours(script) -> None:
    from causal_forcing.config import CAUSAL_FORCING_CONFIGS

    assert set(script.SLUGS) <= CAUSAL_FORCING_CONFIGS.keys()
    words = "original --repo R --slug causal-forcing-t2v-1.3b --config c.yaml --checkpoint c.pt --out o".split()
    assert script.parser().parse_args(words).entry == "generator_ema"
    with pytest.raises(SystemExit):
        script.parser().parse_args([*words, "--slug", "self-forcing-t2v-1.3b"])


def test_a_folder_that_is_no_clone_is_refused(script, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="is no git clone"):
        script.parity.check_clone(tmp_path / "none", script.COMMIT)
