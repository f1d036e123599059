"""``flashdreams bench load`` and ``startup``: a model's own files, and processes of their own."""

from __future__ import annotations

import json

import pytest

from flashdreams.acceleration.bench import startup
from flashdreams.acceleration.bench.loading import measure_load
from flashdreams.acceleration.bench.sampling import Plan
from flashdreams.acceleration.bench.startup import measure_startup
from flashdreams.infra.errors import UserError
from flashdreams.scripts.main import dispatch
from template_model import template_pipeline

pytestmark = pytest.mark.ci_cpu


def test_parts_with_files_here_are_measured(capsys):
    assert dispatch(["bench", "load", "tiny-world", "--repeat", "1", "--warmup", "0", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {"transformer", "decoder"} <= {entry["name"] for entry in report["entries"]}
    assert all(entry["over_bound"] > 0 and "MiB" in entry["note"] for entry in report["entries"])


def test_parts_without_files_are_named():
    entries, facts = measure_load(template_pipeline().config, device="cpu", plan=Plan(1, 0))
    assert not entries
    assert facts["transformer"] == "not measured: random weights is no file or folder here"


def test_the_parts_of_a_start_come_from_the_process_itself(monkeypatch):
    started = []

    def process(program: str, *words: str) -> str:
        started.append(words)
        took = len(started)
        return f"a note\n{json.dumps({'import': took, 'load': 2 * took})}" if words else ""

    monkeypatch.setattr(startup, "_run", process)
    now = iter(range(100))
    entries, _ = measure_startup("a-slug", device="cpu", compile="on", plan=Plan(2, 1, lambda: float(next(now))))
    assert started == [(), ("a-slug", "cpu", "on")] * 3
    assert [(entry.name, entry.seconds) for entry in entries] == [
        ("process", (1.0, 1.0)),
        ("import", (4, 6)),
        ("load", (8, 12)),
    ]
    assert entries[0].bound == (1.0, 1.0) and entries[1].bound is None


def test_a_process_that_fails_says_why(monkeypatch):
    monkeypatch.setattr(startup, "_PROGRAM", "raise SystemExit('there is no such model')")
    with pytest.raises(UserError, match="a process that was started to be measured failed: there is no such model"):
        dispatch(["bench", "startup", "nothing", "--repeat", "1", "--warmup", "0"])
