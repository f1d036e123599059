"""Loading a large model takes the memory of the model."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest


@pytest.mark.manual
def test_peak_memory_is_that_of_the_weights(tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("memory", Path(__file__).with_name("memory.py"))
    memory = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(memory)
    with capsys.disabled():
        table = memory.run(layers=30, repeat=1, folder=str(tmp_path))
    ours = [row for row in table if row["way"] == "ours"]
    assert len(ours) == 6
    for row in ours:
        assert row["size"] / (2 if row["dtype"] == "bfloat16" else 4) > 1.41e9
        assert row["added"] <= 1.10, row
    bare = {row["source"]: row["peak"] for row in table if row["way"] == memory.BARE}
    for row in ours:  # in all, little more than a program that imports torch and touches the file
        if row["dtype"] == "bfloat16":
            assert row["peak"] <= bare[row["source"]] + 0.01 * row["size"], row
