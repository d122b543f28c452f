"""A pytest plugin: prints a table of the tests in tests/gpu that ran, or writes it to the file GPU_REPORT."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Iterable

import pytest

HERE = Path(__file__).parent


@dataclass
class Row:
    """The row of a test file.

    Attributes:
        reasons: why tests were deselected or skipped, with their number.
        failures: the names of failed tests, or the reason for the end of the process.
        running: the test that has not ended.
    """

    file: str
    passed: int = 0
    deselected: int = 0
    skipped: int = 0
    seconds: float = 0.0
    reasons: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    running: str = ""

    def left_out(self, why: str) -> None:
        self.reasons[why] = self.reasons.get(why, 0) + 1

    def note(self) -> str:
        notes = [f"failed: {', '.join(self.failures)}"] if self.failures else []
        return "; ".join(notes + [f"{count} {why}" for why, count in self.reasons.items()])


def save(rows: Iterable[Row], path: Path) -> None:
    path.write_text(json.dumps([asdict(row) for row in rows]))


def load(path: Path) -> list[Row]:
    return [Row(**fields) for fields in json.loads(path.read_text())]


def machine() -> str:
    """The names and versions of device and software."""
    import torch

    if not torch.cuda.is_available():
        return f"no CUDA device; PyTorch {torch.__version__}"
    names = Counter(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    parts = [", ".join(f"{count} x {name}" for name, count in names.items()), f"PyTorch {torch.__version__}"]
    parts.append("NCCL " + ".".join(map(str, torch.cuda.nccl.version())))
    try:
        import triton

        parts.append(f"Triton {triton.__version__}")
    except ImportError:
        parts.append("no Triton")
    return ", ".join(parts)


def table(rows: list[Row]) -> str:
    cells = [
        (row.file, row.passed, len(row.failures), row.deselected + row.skipped, row.seconds, row.note())
        for row in rows
    ]
    cells.append(("all", *(sum(column) for column in list(zip(*cells))[1:5]), ""))
    lines = ["| file | passed | failed | not run | seconds | |", "|---|---|---|---|---|---|"]
    return "\n".join(lines + ["| {} | {} | {} | {} | {:.0f} | {} |".format(*row) for row in cells])


class Report:
    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.rows: dict[str, Row] = {}
        self.path = os.environ.get("GPU_REPORT")

    def _row(self, nodeid: str) -> Row:
        name = Path(nodeid.split("::")[0]).name
        return self.rows.setdefault(name, Row(name))

    @staticmethod
    def _ours(nodeid: str) -> bool:
        return "tests/gpu/" in nodeid

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        policy: Any = self.config.pluginmanager.get_plugin("policy")
        for item in items:
            if self._ours(item.nodeid):
                row = self._row(item.nodeid)
                row.deselected += 1
                row.left_out(policy.deselected.get(item.nodeid, "left out by -k or -m"))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if self._ours(nodeid):
            self._row(nodeid).running = nodeid.split("::", 1)[1]
            self._save()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not self._ours(report.nodeid):
            return
        row = self._row(report.nodeid)
        row.seconds += report.duration
        if report.failed:
            name = report.nodeid.split("::", 1)[1]
            if name not in row.failures:
                row.failures.append(name)
            # At once: pytest prints it at the end, which a process that is ended does not reach.
            if self.path:
                print(f"\n{report.nodeid} failed:\n{report.longreprtext}", flush=True)
        elif report.skipped:
            row.skipped += 1
            row.left_out(str(report.longrepr[2]).removeprefix("Skipped: "))  # type: ignore[index]
        elif report.when == "call" and report.passed:  # neither, if the test is run again
            row.passed += 1
        if report.when == "teardown":
            row.running = ""
        self._save()

    def _save(self) -> None:
        """Called when a test begins and after each of its phases, so that a crash of the process loses no
        results.
        """
        if self.path:
            save(self.rows.values(), Path(self.path))

    def pytest_sessionfinish(self) -> None:
        self._save()

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        ran = any(row.passed or row.failures for row in self.rows.values())
        if ran and not self.path:
            terminalreporter.write_line(
                f"\n{machine()}\n\n{table(sorted(self.rows.values(), key=lambda r: r.file))}"
            )
