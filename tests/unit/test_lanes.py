"""`make test` runs its parts in parallel, ends all processes that it started, and reports failures."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "python" / "build"
sys.path.insert(0, str(BUILD))
from durations import table  # noqa: E402
from lanes import Part, Result, Running, clock, parts_of_test, report, run, second_runs, tail  # noqa: E402

PYTEST = """\
collected 3 items

tests/a.py ..                                                            [ 66%]
tests/b.py F                                                             [100%]

=================================== FAILURES ===================================
assert 1 == 2
=========================== short test summary info ============================
FAILED tests/b.py::test_x - assert 1 == 2
========================= 1 failed, 2 passed in 0.12s ==========================
"""


def python(name: str, code: str, **options: float) -> Part:
    return Part(name, [sys.executable, "-c", code, "{seconds}", "{minutes}"], **options)


def ids(line: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", line)]


def alive(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().split(")")[-1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for_end(pid: int) -> None:
    """A killed process may need a while to end on a busy machine."""
    until = time.monotonic() + 60
    while alive(pid):
        assert time.monotonic() < until, f"process {pid} still runs"
        time.sleep(0.01)


def test_the_parts_of_make_test_are_all_tests() -> None:
    """Each file of tests belongs to one part."""
    found = Counter[Path]()
    for part in (p for p in parts_of_test() if "pytest" in p.command):
        words = part.command[part.command.index("no:cacheprovider") + 1 :]
        given = [ROOT / word for word in words if not word.startswith("--")] or [ROOT / "tests"]
        ignored = [ROOT / word.removeprefix("--ignore=") for word in words if word.startswith("--ignore=")]
        assert all(path.exists() for path in [*given, *ignored]), part.name
        found.update(
            path
            for path in (ROOT / "tests").rglob("test_*.py")
            if any(path.is_relative_to(each) for each in given)
            and not any(path.is_relative_to(i) for i in ignored)
        )
    assert found == dict.fromkeys((ROOT / "tests").rglob("test_*.py"), 1)


def test_each_part_has_a_log_and_a_result(tmp_path: Path) -> None:
    parts = [
        python(name, f"import sys; print('this is {name}'); sys.exit({status})")
        for name, status in (("a", 0), ("b", 3))
    ]
    reported: list[str] = []
    results = {r.part.name: r for r in run([*parts, python("c", "")], 2, tmp_path, reported.append)}
    assert {name: r.status for name, r in results.items()} == {"a": 0, "b": 3, "c": 0}
    assert (tmp_path / "b.log").read_text() == "this is b\n"
    assert any(line.startswith("b: status 3") for line in reported)
    out = io.StringIO()
    assert report(list(results.values()), [], tmp_path, out) == 1
    assert out.getvalue().endswith("failed: b\n")


def test_a_part_gets_its_time_as_an_argument(tmp_path: Path) -> None:
    part = python("a", "import sys; print(*sys.argv[1:])", wants_s=30, needs_s=10, extra_s=5)
    assert part.seconds(left_s=100) == 30
    assert part.seconds(left_s=20) == 15
    assert part.seconds(left_s=14) is None
    (result,) = run([part], 1, tmp_path, lambda line: None, time_s=1000)
    assert (tmp_path / "a.log").read_text() == "30 0.5\n"
    assert result.command[-2:] == ("30", "0.5")
    (result,) = run([part], 1, tmp_path, lambda line: None, time_s=10)
    assert result.status is None
    assert not result.failed


def test_a_part_that_takes_too_long_is_ended_with_its_children(tmp_path: Path) -> None:
    child = (
        "import subprocess, sys; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True); p.wait()"
    )
    lines: list[str] = []
    for over_s in (0.5, 5, 50):  # longer if the child had not started yet
        (result,) = run([python("a", child)], 1, tmp_path, lambda line: None, time_s=0.5, over_s=over_s)
        assert result.ended
        assert result.failed
        lines = (tmp_path / "a.log").read_text().splitlines()
        if lines and lines[0].isdecimal():
            break
    wait_for_end(int(lines[0]))


def run_of_pytest(test: Path, **env: str) -> Part:
    """A run of pytest with this project's tests/conftest.py."""
    options = ["-p", "no:cacheprovider", f"--rootdir={ROOT}", "-p", "tests.conftest"]
    command = [sys.executable, "-m", "pytest", *options, str(test)]
    return Part("a", command, env={"PYTHONPATH": str(ROOT), **env})


def hangs_at_its_end(tmp_path: Path, exit_s: str) -> Part:
    """A run of pytest whose process does not end after its tests: tests/conftest.py ends it after `exit_s`
    seconds.
    """
    test = tmp_path / "test_hangs.py"
    test.write_text(
        "import atexit, time\n\ndef test_passes():\n    atexit.register(hangs)\n\n"
        "def hangs():\n    print('waits', flush=True)\n    time.sleep(600)\n"
    )
    return run_of_pytest(test, EXIT_S=exit_s)


@pytest.mark.slow  # it waits for limits
def test_a_run_of_pytest_that_does_not_end_fails_with_its_stacks(tmp_path: Path) -> None:
    (result,) = run([hangs_at_its_end(tmp_path, "0.5")], 1, tmp_path, lambda line: None, time_s=60)
    assert result.status == 1
    assert not result.ended
    log = (tmp_path / "a.log").read_text()
    assert "1 passed" in log
    assert "in hangs" in log


@pytest.mark.slow  # it waits for limits
def test_a_test_that_hangs_in_native_code_is_ended_with_its_stacks(tmp_path: Path) -> None:
    """No Python handles the signal of pytest-timeout meanwhile: tests/conftest.py ends the process."""
    test = tmp_path / "test_hangs.py"
    test.write_text(
        "import ctypes, pytest\n\n@pytest.mark.timeout(0.1)\ndef test_hangs():\n"
        "    mutex = ctypes.create_string_buffer(64)\n"
        "    for _ in range(2):  # the second waits for the first\n"
        "        ctypes.PyDLL(None).pthread_mutex_lock(mutex)\n"
    )
    (result,) = run([run_of_pytest(test, HANGS_S="1")], 1, tmp_path, lambda line: None, time_s=60)
    assert (result.status, result.ended) == (1, False)
    assert "in test_hangs" in (tmp_path / "a.log").read_text()


@pytest.mark.slow
def test_a_part_that_takes_too_long_writes_its_stacks_first(tmp_path: Path) -> None:
    part = hangs_at_its_end(tmp_path, "600")
    log = tmp_path / "a.log"
    running = Running(part, log, 0, float("inf"))
    until = time.monotonic() + 60
    while "waits" not in log.read_text():
        assert time.monotonic() < until, log.read_text()
        assert running.poll() is None, log.read_text()
        time.sleep(0.05)
    running.until = 0
    result = running.poll()
    assert result is not None
    assert result.failed
    assert "1 passed" in log.read_text()
    # Written by faulthandler at SIGQUIT, before SIGINT.
    stacks = log.read_text().partition("most recent call first")[2]
    assert "in hangs" in stacks.splitlines()[1]


def test_a_part_that_was_left_out_fails_make_test(tmp_path: Path) -> None:
    out = io.StringIO()
    assert report([Result(python("a", ""), (), 0.0, None)], [], tmp_path, out) == 1
    assert out.getvalue().endswith("failed: a\n")


def test_a_part_that_does_not_start_has_failed(tmp_path: Path) -> None:
    results = run([Part("a", ["/no/such/program"]), python("b", "")], 1, tmp_path, lambda line: None)
    assert [(r.part.name, r.status) for r in results] == [("a", 127), ("b", 0)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_everything(tmp_path: Path, number: signal.Signals) -> None:
    script = f"""if True:
        import sys; sys.path.insert(0, {str(BUILD)!r})
        import lanes; from pathlib import Path
        lanes.ends_on_signals()
        code = "import os, time; print(os.getpid()); time.sleep(600)"
        parts = [lanes.Part(name, [sys.executable, "-uc", code]) for name in "abc"]
        results = lanes.run(parts, 2, Path("."), print)
        print([(r.part.name, r.status) for r in results])
    """
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as lanes:
        logs = [tmp_path / "a.log", tmp_path / "b.log"]
        until = time.monotonic() + 60
        while not all(log.exists() and log.read_text().endswith("\n") for log in logs):
            assert time.monotonic() < until, "the parts did not begin"
            time.sleep(0.05)
        pids = [ids(log.read_text())[0] for log in logs]
        os.kill(lanes.pid, number)
        output, _ = lanes.communicate(timeout=60)
    assert "[('a', 130), ('b', 130)]" in output
    for pid in pids:
        wait_for_end(pid)


def test_the_end_of_a_log_is_shown() -> None:
    assert tail(PYTEST, failed=True).startswith("=================================== FAILURES")
    passed = PYTEST.replace("F  ", ".  ").split("====")[0] + "==== 3 passed in 0.12s ===="
    assert tail(passed, failed=False).strip() == "==== 3 passed in 0.12s ===="
    go = "ok  \texample.org/go/sim\t12.1s\nok  \texample.org/go/round\t(cached)\n"
    assert tail(go, failed=False) == go.strip()
    stacks = 'Thread 0x1 (most recent call first):\n  File "/a/test_b.py", line 3 in test\n'
    assert (
        tail(stacks + '  File "/site-packages/_pytest/main.py", line 4 in _main\n', failed=True)
        == stacks.strip()
    )
    long = tail("\n".join(str(n) for n in range(1000)), failed=True).splitlines()
    assert long[0] == "... 600 lines left out ..."
    assert long[-1] == "999"


def test_few_tests_of_all_parts_may_need_a_second_run(tmp_path: Path) -> None:
    result = Result(python("a", ""), (), 1.0, 0)
    (tmp_path / "a.log").write_text("1 passed\n")
    assert report([result], second_runs(tmp_path), tmp_path, io.StringIO()) == 0
    flaky = tmp_path / "flaky.jsonl"
    flaky.write_text('{"test": "x"}\n{"test": "x"}\n')
    assert second_runs(tmp_path) == ["x"]
    package = "example.org/torchft/go/internal/rpc"
    (tmp_path / "flaky-race.txt").write_text(
        f"{package}.TestA: 2 runs, 1 failures\n{package}.TestA/a_case.b/c: 2 runs, 1 failures\n"
    )
    assert second_runs(tmp_path) == ["go/internal/rpc.TestA", "x"]
    assert report([result], second_runs(tmp_path), tmp_path, io.StringIO()) == 0
    flaky.write_text('{"test": "x"}\n{"test": "y"}\n')
    out = io.StringIO()
    assert report([result], second_runs(tmp_path), tmp_path, out) == 1
    assert "3 tests needed a second run: more than one of Go or of Python is a failure" in out.getvalue()
    (tmp_path / "flaky-race.txt").unlink()
    assert second_runs(tmp_path) == ["x", "y"]
    assert report([result], second_runs(tmp_path), tmp_path, io.StringIO()) == 1
    assert report([result], ["go/sim.TestA", "go/sim.TestB"], tmp_path, io.StringIO()) == 1


def test_durations_are_shown_with_units() -> None:
    assert [clock(s) for s in (0.4, 59, 60, 725)] == ["0s", "59s", "1m00s", "12m05s"]


def test_the_table_of_durations(tmp_path: Path) -> None:
    (tmp_path / "unit.xml").write_text(
        '<testsuites><testsuite><testcase classname="tests.unit.test_a" name="x" time="1.5"/>'
        '<testcase classname="tests.unit.test_a.TestB" name="y" time="2"/>'
        '<testcase classname="tests.unit.test_c" name="z" time="0.5"/></testsuite></testsuites>'
    )
    (tmp_path / "go.log").write_text(
        "ok  \texample.org/torchft/go/sim\t12.1s\nok  \texample.org/torchft/go/round\t(cached)\n"
    )
    assert table(tmp_path, most=2).splitlines()[2:] == [
        "| 12.1 |  | `go/sim` |",
        "| 3.5 | 2 | `tests/unit/test_a.py` |",
        "| 0.5 | 1 | 2 others |",
        "| 16.1 | 3 | all |",
    ]
