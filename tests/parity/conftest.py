"""Prints how near ours came to the public libraries."""

from __future__ import annotations

import pytest

from float64 import FIGURES


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if FIGURES:
        terminalreporter.section("parity: max |d| in float64")
        for what, found in sorted(FIGURES.items()):
            terminalreporter.write_line(f"{found:.1e}  {what}")
