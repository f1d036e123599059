"""Fresh notices for every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flashdreams.core import notices


@pytest.fixture(autouse=True)
def fresh_notices() -> Iterator[None]:
    notices.reset()
    yield
    notices.reset()
