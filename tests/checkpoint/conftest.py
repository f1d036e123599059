"""What all checkpoint tests share: caches of their own, and no notices said before."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from huggingface_hub import constants
from safetensors.torch import save

from flashdreams.core import notices
from hub_server import FakeHub
from small_model import weights


@pytest.fixture(autouse=True)
def _own_caches(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHDREAMS_CACHE", str(tmp_path_factory.mktemp("cache")))
    notices.reset()


@pytest.fixture
def cases() -> Path:
    return Path(__file__).parents[1] / "cases"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder of the hub, no token, and no waiting between tries."""
    folder = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 10)
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 10)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 50_000)  # the library writes what arrived in such pieces
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: sleep(min(seconds, 0.01)))
    return folder


@pytest.fixture
def hub(cache, monkeypatch):
    """A stand-in for the hub that has one small model."""
    with FakeHub({"model.safetensors": save(weights()), "config.json": b"{}"}) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        )
        yield server
