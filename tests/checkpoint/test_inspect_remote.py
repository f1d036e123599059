"""What a remote checkpoint holds, and whether it fits, is said from its headers: its tensors never travel."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save

from flashdreams.scripts.checkpoint import main
from mini_wan import FILE, PLUGIN
from small_model import save_shards

pytestmark = pytest.mark.ci_cpu

HEADERS = 1024 + (1 << 20)
"""Bytes that are asked of one file: its beginning, to see what it is, and once more for the header."""


@pytest.fixture
def large(hub, tmp_path, monkeypatch):
    """Two shards of 8 MB: the keys of a small model, and one large tensor in each."""
    monkeypatch.setenv("FLASHDREAMS_RUNNER_CONFIGS", PLUGIN)
    state = load_file(FILE) | {f"large.{i}": torch.zeros(2_000_000) for i in range(2)}
    (tmp_path / "m").mkdir()
    save_shards(tmp_path / "m", state, 2)
    hub.files = {path.name: path.read_bytes() for path in (tmp_path / "m").iterdir()}
    assert sum(map(len, hub.files.values())) > 16_000_000
    return hub, tmp_path / "m", state


def test_inspect_reads_headers_alone_and_says_what_it_says_of_the_local_files(large, cache, capsys):
    hub, folder, state = large
    assert main(["inspect", "org/model"], "checkpoint") == 0
    remote = capsys.readouterr().out
    assert f"{len(state)} tensors" in remote and "F32 [2000000]" in remote
    assert hub.sent <= 2 * HEADERS + len(hub.files["model.safetensors.index.json"])
    assert not [path for path in cache.rglob("*") if path.is_file() and path.stat().st_size > HEADERS]
    assert main(["inspect", str(folder)], "checkpoint") == 0
    assert capsys.readouterr().out == remote


def test_verify_and_diff_do_not_fetch_tensors_either(large, capsys):
    hub, folder, state = large
    assert main(["verify", "mini-wan", "org/model"], "checkpoint") == 1
    assert "2 unexpected" in capsys.readouterr().out
    assert main(["diff", "org/model", str(folder)], "checkpoint") == 0
    assert hub.sent <= 4 * HEADERS + 2 * len(hub.files["model.safetensors.index.json"])


def test_a_single_small_file_is_read_no_further_than_its_header(hub, capsys):
    hub.files = {"model.safetensors": save({"x": torch.zeros(3_000_000)})}
    assert main(["inspect", "hf://org/model/model.safetensors"], "checkpoint") == 0
    assert "1 tensors, 3,000,000 numbers" in capsys.readouterr().out
    assert hub.sent <= HEADERS
