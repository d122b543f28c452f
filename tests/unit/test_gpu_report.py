"""The table of the tests that ran on a device (`make test-gpu`), checked without a device on files that
imitate such tests.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.report import Row, table
from tests.gpu.run import run

# Replaces the count of devices, which would import PyTorch.
CONFTEST = """
from tests import policy
from tests.gpu.report import Report
pytest_plugins = ["tests.policy"]
policy.devices = lambda: 0
def pytest_configure(config):
    config.pluginmanager.register(Report(config))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RERUNS", "0")
    monkeypatch.delenv("CI", raising=False)
    folder = tmp_path / "tests" / "gpu"
    folder.mkdir(parents=True)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return folder


def file(folder: Path, text: str) -> Path:
    path = folder / "test_some.py"
    path.write_text(f"import os, signal, time, pytest\n{text}\n")
    return path


def test_counts_and_reasons(folder: Path) -> None:
    text = """
def test_one(): pass
def test_two(): assert False
@pytest.fixture
def breaks(): 1 / 0
def test_three(breaks): pass
def test_four(): pytest.skip("no such tool")
@pytest.mark.devices(99)
@pytest.mark.parametrize("i", range(3))
def test_five(i): pass
"""
    (row,), status = run(file(folder, text), 60)
    assert status == 1
    assert (row.file, row.passed, row.skipped, row.deselected) == ("test_some.py", 1, 1, 3)
    assert row.failures == ["test_two", "test_three"]
    assert row.reasons["no such tool"] == 1
    (needs,) = (count for why, count in row.reasons.items() if "need 99 CUDA devices" in why)
    assert needs == 3 and row.seconds > 0


def test_results_before_a_crash_are_kept(folder: Path) -> None:
    text = (
        "def test_one(): pass\ndef test_two(): os.kill(os.getpid(), signal.SIGKILL)\ndef test_three(): pass"
    )
    (row,), status = run(file(folder, text), 60)
    assert status != 0 and row.passed == 1
    assert row.failures == ["test_two (ended by SIGKILL)"]


def test_failures_before_a_crash_are_printed(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = "def test_one(): assert 6 * 7 == 41\ndef test_two(): os.kill(os.getpid(), signal.SIGKILL)"
    run(file(folder, text), 60)
    assert "assert (6 * 7) == 41" in capfd.readouterr().out


def test_a_test_that_is_run_again_counts_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RERUNS", "1")
    text = """
ran = []
def test_one():
    ran.append(1)
    assert len(ran) == 2
"""
    (row,), status = run(file(folder, text), 60)
    assert (row.passed, row.failures, status) == (1, [], 0)


@pytest.mark.slow  # the same as the crash above, except for the time limit
def test_a_hanging_test_is_ended(folder: Path) -> None:
    """A test is also ended if the interpreter does not run any code, so that pytest-timeout has no effect."""
    text = "def test_one(): pass\ndef test_two():\n"
    text += "    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM, signal.SIGABRT}); time.sleep(60)"
    for seconds in (8, 50):  # longer if the tests began too late
        (row,), status = run(file(folder, text), seconds)
        assert status != 0
        if row.passed == 1:
            break
    assert row.passed == 1 and row.failures == [f"test_two (not ended after {seconds} s)"]


def test_a_file_that_cannot_be_imported_fails(folder: Path) -> None:
    (row,), status = run(file(folder, "import no_such_module"), 60)
    assert status != 0 and len(row.failures) == 1


def test_the_table() -> None:
    rows = [
        Row("test_a.py", passed=3, seconds=1.6),
        Row(
            "test_b.py",
            passed=1,
            skipped=1,
            deselected=2,
            seconds=2.0,
            reasons={"why": 3},
            failures=["test_x"],
        ),
    ]
    assert table(rows).splitlines()[2:] == [
        "| test_a.py | 3 | 0 | 0 | 2 |  |",
        "| test_b.py | 1 | 1 | 3 | 2 | failed: test_x; 3 why |",
        "| all | 4 | 1 | 3 | 4 |  |",
    ]
