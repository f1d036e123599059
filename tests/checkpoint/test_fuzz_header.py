"""A bounded run of the fuzzer, and the cases it found."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from flashdreams.core.checkpoint import CheckpointError
from flashdreams.core.checkpoint.header import header_length, parse_header

pytestmark = pytest.mark.ci_cpu


@pytest.fixture(scope="module")
def fuzz_header():
    import sys

    spec = importlib.util.spec_from_file_location("fuzz_header", Path(__file__).with_name("fuzz_header.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules["fuzz_header"] = module
    spec.loader.exec_module(module)
    return module


def test_random_damage_ends_in_one_clear_error_or_what_the_library_reads(fuzz_header):
    count, findings = fuzz_header.fuzz(cases=4000, every=100)
    assert count == 4000 and findings.wrong == {}
    for outcome in ("read", "refused", "index read", "index refused", "loaded", "load refused"):
        assert findings.outcomes[outcome] >= 5, outcome


def test_the_fuzzer_notices_what_must_not_be(fuzz_header, monkeypatch):
    def careless(data, size, name):
        return parse_header(data, size, name) if b"F16" not in data else json.loads(data)["F16"]

    monkeypatch.setattr(fuzz_header, "parse_header", careless)
    assert fuzz_header.fuzz(cases=300, every=1000)[1].wrong


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("table", "size", "problem"),
    [
        ({"a": entry()}, 7, "it is cut off: .* bytes expected, the last 1 are missing"),
        ({"a": entry()}, 9, "it has 1 bytes after its last tensor"),
        ({"a": entry(), "b": entry()}, 8, "'b' overlaps 'a'"),
        ({"a": entry(), "b": entry(offsets=(12, 20))}, 20, "'b' leaves 4 unused bytes after 'a'"),
        ({"a": entry(offsets=(8, 0))}, 8, "its offsets hold -8"),
        ({"a": entry(shape=(3,))}, 8, r"'a' F32 \[3\] takes 12 bytes, but its offsets hold 8"),
        ({"a": entry(shape=(2**62, 4))}, 8, "larger than any memory"),
        ({"a": entry(shape=(-1,))}, 8, "which are no sizes"),
        ({"a": entry(shape=(True,))}, 8, "which are no sizes"),
        ({"a": entry(shape=(2.0,))}, 8, "which are no sizes"),
        ({"a": entry(offsets=(0, 4, 8))}, 8, "which are no sizes"),
        ({"a": entry("Q4_0")}, 8, "'a' has the unknown number format 'Q4_0'"),
        ({"a": 1}, 8, "'a' lacks dtype, shape or data_offsets"),
        ({"a": {**entry(), "more": 1}}, 8, "or has more than these"),
        ({"__metadata__": {"a": 1}}, 0, "__metadata__ is not a table of texts"),
    ],
)
def test_what_is_wrong_with_an_entry_is_said(table, size, problem):
    data = json.dumps(table).encode()
    with pytest.raises(CheckpointError, match=problem):
        parse_header(data, 8 + len(data) + size, "w")


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b'{"a":1,"a":1}', "has the key 'a' twice"),
        (b'{"a":{"dtype":1,"dtype":1}}', "has the key 'dtype' twice"),
        (b'{"a":NaN}', "has the number NaN"),
        (b'{"a":' * 100_000, "too deeply nested"),
        (b'{"\\ud800":1}', "damaged"),
        (b'{"a":' + b"9" * 5000 + b"}", "Exceeds|damaged"),
        (b'{"a"', "damaged"),
        (b"[]", "not JSON"),
        (b"{}x", "damaged"),
        ("{}".encode("utf-16"), "not JSON"),
        (b"{\xff}", "damaged"),
    ],
)
def test_what_is_wrong_with_the_text_is_said(data, problem):
    with pytest.raises(CheckpointError, match=problem):
        parse_header(data, 8 + len(data), "w")


@pytest.mark.parametrize(
    ("claim", "size", "problem"),
    [
        (10**10, 100, "header claims 10000000000 bytes"),
        (2**64 - 1, 100, "header claims"),
        (93, 100, "cut off inside it"),
    ],
)
def test_lengths_that_lie(claim, size, problem):
    with pytest.raises(CheckpointError, match=problem):
        header_length(claim.to_bytes(8, "little"), size, "w")
