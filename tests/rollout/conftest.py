"""Small pipelines for the tests of rollout and replay: the template, which has controls, a sink and a ragged start."""

from __future__ import annotations

import pytest

from template_model import template_pipeline


@pytest.fixture(scope="session")
def pipeline():
    """Deterministic in serving (two Euler steps)."""
    return template_pipeline()


@pytest.fixture
def fresh():
    """The same, for tests that change weights."""
    return template_pipeline()
