"""The rules of the root conftest.py, tried on small suites of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.ci_cpu

ROOT = Path(__file__).resolve().parents[2]
INI = """
[pytest]
addopts = --strict-markers -p no:cacheprovider
markers =
    ci_cpu: x
    ci_gpu: x
    manual: x
"""


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeconftest((ROOT / "conftest.py").read_text())
    pytester.makefile(".ini", pytest=INI)
    return pytester


def test_one_marker_passes(suite: pytest.Pytester) -> None:
    suite.makepyfile("import pytest\n@pytest.mark.ci_cpu\ndef test_it(): pass")
    suite.runpytest_inprocess().assert_outcomes(passed=1)


@pytest.mark.parametrize(
    ("markers", "named"), [("", "none"), ("@pytest.mark.ci_cpu\n@pytest.mark.manual\n", "ci_cpu, manual")]
)
@pytest.mark.parametrize("expression", ["", "ci_cpu", "ci_gpu"])
def test_no_marker_or_two_stop_the_run(suite: pytest.Pytester, markers: str, named: str, expression: str) -> None:
    suite.makepyfile(test_a=f"import pytest\n{markers}def test_it(): pass")
    result = suite.runpytest_inprocess("-m", expression)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert f"test_a.py::test_it: {named}" in result.stderr.str()


def test_an_unknown_marker_is_an_error(suite: pytest.Pytester) -> None:
    suite.makepyfile("import pytest\n@pytest.mark.ci_cpu\n@pytest.mark.slow\ndef test_it(): pass")
    suite.runpytest_inprocess().assert_outcomes(errors=1)


def test_gpu_tests_skip_without_cuda(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    suite.makepyfile("import pytest\n@pytest.mark.ci_gpu\ndef test_it(): assert False")
    suite.runpytest_inprocess("-m", "ci_gpu").assert_outcomes(skipped=1)


def test_gpu_tests_run_with_cuda(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    suite.makepyfile("import pytest\n@pytest.mark.ci_gpu\ndef test_it(): pass")
    suite.runpytest_inprocess("-m", "ci_gpu").assert_outcomes(passed=1)


@pytest.mark.parametrize(("expression", "passed", "skipped"), [("", 0, 1), ("manual", 1, 0)])
def test_manual_tests_run_only_when_named(suite: pytest.Pytester, expression: str, passed: int, skipped: int) -> None:
    suite.makepyfile("import pytest\n@pytest.mark.manual\ndef test_it(): pass")
    suite.runpytest_inprocess("-m", expression).assert_outcomes(passed=passed, skipped=skipped)
