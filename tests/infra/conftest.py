"""Fixtures of the infra tests."""

from __future__ import annotations

import pytest

from template_model import template_pipeline


@pytest.fixture(scope="session")
def pipeline():
    return template_pipeline()
