"""The comparison with the original: its command line and what is its own in it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

pytestmark = pytest.mark.ci_cpu


@pytest.fixture
def script():
    path = Path(__file__).parent / "parity_check/run.py"
    spec = importlib.util.spec_from_file_location("causal_forcing_parity", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_its_slugs_are_ours(script) -> None:
    from causal_forcing.config import CAUSAL_FORCING_CONFIGS

    assert set(script.SLUGS) <= CAUSAL_FORCING_CONFIGS.keys()
    words = "original --repo R --slug causal-forcing-t2v-1.3b --config c.yaml --checkpoint c.pt --out o".split()
    assert script.parser().parse_args(words).entry == "generator_ema"
    with pytest.raises(SystemExit):
        script.parser().parse_args([*words, "--slug", "self-forcing-t2v-1.3b"])
