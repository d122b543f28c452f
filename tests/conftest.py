"""What every test gets: no settings of the user's, and no wait without an end (timeout in pyproject.toml).

Tests with real processes or many threads get a second run when they fail, and the report shows the first one whole.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
# Here processes are killed while others run, and a machine with two busy processors can hold any of them up for long.
WITH_PROCESSES = [TESTS / "integration", TESTS / "process", TESTS / "unit" / "process_group"]
RERUNS = int(os.environ.get("RERUNS", "1"))

# PyTorch's TCPStore asks the name server for the name of every address that connects, also of a loopback one, and waits
# 5 s for a lost answer. Tests that create stores by the dozen meet that even where answers are rarely lost.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


@pytest.fixture(autouse=True, scope="session")
def state_of_lighthouses(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The command keeps the last quorum of a job in the user's home; that of a test stays with the test."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests set what they need; a lighthouse or a host name of the user's shell must not reach them."""
    for name in list(os.environ):
        if name.startswith("TORCHFT_"):
            monkeypatch.delenv(name)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if RERUNS and any(folder in item.path.parents for folder in WITH_PROCESSES):
            item.add_marker(pytest.mark.flaky(reruns=RERUNS))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A failure that a second run did not repeat is a mistake to find: it is shown as any other is."""
    for report in terminalreporter.getreports("rerun"):
        terminalreporter.section(f"{report.nodeid} was run again after this", yellow=True)
        terminalreporter.write_line(report.longreprtext)
        for name, text in report.sections:
            terminalreporter.section(name, "-")
            terminalreporter.write_line(text)
