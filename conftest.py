"""Test rules of the whole workspace: exactly one lane marker per test, and lanes that skip themselves."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

LANES = ("ci_cpu", "ci_gpu", "manual")

# Torch warms up slowly in a fresh process, so no example has a deadline. CI repeats the same examples on every run.
_common = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("ci", max_examples=20, derandomize=True, **_common)
settings.register_profile("local", max_examples=20, **_common)
settings.register_profile("thorough", max_examples=300, **_common)
settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.hookimpl(tryfirst=True)  # before -m throws items away
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuse the run when a test has no lane or several; keep ``manual`` out unless ``-m`` names it."""
    lanes = {item: [lane for lane in LANES if item.get_closest_marker(lane)] for item in items}
    wrong = [f"  {item.nodeid}: {', '.join(found) or 'none'}" for item, found in lanes.items() if len(found) != 1]
    if wrong:
        expected = " or ".join(LANES)
        raise pytest.UsageError(
            f"every test carries exactly one marker, {expected}; these do not:\n" + "\n".join(wrong)
        )
    if "manual" not in config.getoption("markexpr"):
        skip = pytest.mark.skip(reason="manual: run it with -m manual")
        for item, found in lanes.items():
            if found == ["manual"]:
                item.add_marker(skip)


def pytest_configure(config: pytest.Config) -> None:
    """Workers of pytest-xdist share the cores between them, and so do the processes that tests start."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.environ["OMP_NUM_THREADS"] = "1"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip the GPU lane where there is no CUDA device."""
    if item.get_closest_marker("ci_gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
