"""What a benchmark found: for programs (JSON), for people (a table), and against an earlier one."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flashdreams.acceleration.bench.sampling import median, percentile
from flashdreams.infra.record import environment

FORMAT = 1


@dataclass(frozen=True)
class Entry:
    """Seconds of one thing, one per round, and of its bound in the same rounds."""

    name: str
    seconds: tuple[float, ...]
    bound: tuple[float, ...] | None = None
    flops: int | None = None
    """Work of the bound, 2 per multiply-add."""
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Median over the rounds of time over bound."""
        if self.bound is None:
            return None
        return median([spent / least for spent, least in zip(self.seconds, self.bound, strict=True)])

    def to_dict(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"name": self.name, "rounds": len(self.seconds), "min_s": min(self.seconds)}
        facts |= {f"p{round(100 * share)}_s": percentile(self.seconds, share) for share in (0.5, 0.9, 0.99)}
        if self.bound is not None:
            facts |= {"bound_p50_s": median(self.bound), "bound_min_s": min(self.bound), "over_bound": self.ratio}
        if self.flops is not None:
            facts |= {"flops": self.flops, "gflops_per_s": self.flops / facts["p50_s"] / 1e9}
        if self.note:
            facts["note"] = self.note
        return facts | {"seconds": list(self.seconds), "bound_seconds": list(self.bound or ())}


@dataclass(frozen=True)
class Report:
    """``settings`` are what was asked for, ``machine`` what the figures depend on besides."""

    command: str
    settings: Mapping[str, Any]
    entries: tuple[Entry, ...]
    machine: Mapping[str, Any]
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What was found besides times."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "bench": self.command,
            "settings": dict(self.settings),
            "machine": dict(self.machine),
            "facts": dict(self.facts),
            "entries": [entry.to_dict() for entry in self.entries],
        }

    def table(self) -> str:
        """A line per entry, times in milliseconds."""
        rows: list[tuple[str, ...]] = [
            ("", "p50 ms", "p90 ms", "p99 ms", "min ms", "bound ms", "over bound", "GFLOP/s")
        ]
        for entry in self.entries:
            facts = entry.to_dict()
            times = [f"{1000 * facts[name]:.3f}" for name in ("p50_s", "p90_s", "p99_s", "min_s")]
            bound = ("", "") if entry.bound is None else (f"{1000 * facts['bound_p50_s']:.3f}", f"{entry.ratio:.3f}")
            rate = f"{facts['gflops_per_s']:.1f}" if entry.flops else ""
            rows.append((entry.name, *times, *bound, rate))
        lines = _aligned(rows)
        lines += [f"{entry.name}: {entry.note}" for entry in self.entries if entry.note]
        lines += [f"{name}: {value}" for name, value in self.facts.items()]
        machine = ", ".join(f"{name} {value}" for name, value in self.machine.items())
        rounds = len(self.entries[0].seconds) if self.entries else 0
        return "\n".join([*lines, f"{rounds} rounds; {machine}"])


def compare(report: Report, earlier: Mapping[str, Any]) -> tuple[dict[str, float], list[str]]:
    """Median time of each entry over that of the same entry in ``earlier``, a report's JSON; and what to keep in mind.

    Raises:
        ValueError: ``earlier`` is no report, or one of another benchmark.
    """
    if earlier.get("format") != FORMAT or "entries" not in earlier:
        raise ValueError(
            f"it has format {earlier.get('format')!r}; expected a report of `flashdreams bench` ({FORMAT})"
        )
    if earlier["bench"] != report.command:
        raise ValueError(f"it is of `bench {earlier['bench']}`; this is `bench {report.command}`")
    then = {entry["name"]: entry["p50_s"] for entry in earlier["entries"]}
    now = {entry.name: median(entry.seconds) for entry in report.entries}
    notes = []
    for what in ("settings", "machine"):
        ours, theirs = getattr(report, what), earlier[what]
        for name in sorted({*ours, *theirs} - {"date", "load"}):
            if ours.get(name) != theirs.get(name):
                notes.append(f"{name} is {ours.get(name)!r}, was {theirs.get(name)!r}")
    for name in sorted(now.keys() ^ then.keys()):
        notes.append(f"{name} is only in the {'present' if name in now else 'earlier'} report")
    return {name: seconds / then[name] for name, seconds in now.items() if name in then}, notes


def machine(device: str) -> dict[str, Any]:
    """What figures depend on: versions, processor, threads, and how busy the machine is."""
    facts = environment(device) | {"cpu": _cpu(), "cores": os.cpu_count()}
    facts["instructions"] = torch.backends.cpu.get_cpu_capability()
    if hasattr(os, "getloadavg"):
        facts["load"] = round(os.getloadavg()[0], 2)
    facts["date"] = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M")
    return facts


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """First column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
