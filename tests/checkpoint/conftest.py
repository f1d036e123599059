"""What all checkpoint tests share: caches of their own, and no notices said before."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashdreams.core import notices


@pytest.fixture(autouse=True)
def _own_caches(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHDREAMS_CACHE", str(tmp_path_factory.mktemp("cache")))
    notices.reset()


@pytest.fixture
def cases() -> Path:
    return Path(__file__).parents[1] / "cases"
