"""One loaded template model for all tests of sessions."""

from __future__ import annotations

from typing import Any

import pytest

from serving import template_pipeline


@pytest.fixture(scope="session")
def template() -> Any:
    return template_pipeline()
