"""Writes ``docs/support-matrix.md`` after a run of every cell of the support matrix, on any number of workers.

Cells say what became of them by ``record_property``, which pytest carries to the process that reports.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support_matrix import Cell, cells, page

PAGE = Path(__file__).resolve().parents[1] / "docs" / "support-matrix.md"


class MatrixPage:
    """A pytest plugin of the process that reports."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}
        self.written = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        known = {name: str(value) for name, value in report.user_properties}
        if report.when == "call" and report.passed and "cell" in known:
            self.outcomes[known["cell"]] = known.get("refused", "")

    def pytest_sessionfinish(self) -> None:
        found: dict[Cell, str] = {c: self.outcomes[str(c)] for c in cells() if str(c) in self.outcomes}
        if len(found) == len(cells()):
            PAGE.write_text(page(found), encoding="utf-8")
            self.written = True

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.written:
            terminalreporter.write_line(f"support matrix: {len(self.outcomes)} cells, written to {PAGE.name}")
