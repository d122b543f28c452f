"""Second runs, deselected tests, and skips: each is a separate run of pytest in this process."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from tests import policy

ROOT = Path(__file__).resolve().parents[2]
pytest_plugins = ["pytester"]

# Fails in its first run.
FLAKY = """
import pytest
@pytest.mark.parametrize("i", range({count}))
def test_it(i, tmp_path_factory):
    been = tmp_path_factory.getbasetemp() / str(i)
    if not been.exists():
        been.touch()
        {failure}
"""


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CI", "RERUNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def run(pytester: pytest.Pytester, text: str) -> pytest.RunResult:
    pytester.makepyfile(text)
    return run_again(pytester)


def run_again(pytester: pytest.Pytester, *args: str) -> pytest.RunResult:
    # faulthandler would replace Go's handler of SIGSEGV in this process, which turns the signal into a panic.
    return pytester.runpytest_inprocess(
        "-p", "no:faulthandler", "-p", "tests.policy", "--strict-markers", *args
    )


def outcomes(done: pytest.RunResult) -> dict[str, int]:
    return done.parseoutcomes()


def flaky(count: int = 1, failure: str = "assert False, 'too early'") -> str:
    return FLAKY.format(count=count, failure=failure)


def test_a_failed_test_has_a_second_run_that_is_recorded(pytester: pytest.Pytester) -> None:
    done = run(pytester, flaky())
    assert done.ret == 0
    assert outcomes(done) == {"passed": 1, "rerun": 1}
    done.stdout.fnmatch_lines(["*test_it?0? was run again after this*", "*AssertionError: too early*"])
    (line,) = (pytester.path / "build" / "test" / "flaky.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert record["test"].endswith("::test_it[0]") and "too early" in record["failure"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:]+\+00:00", record["date"])


def test_more_than_one_second_run_fails_the_run(pytester: pytest.Pytester) -> None:
    done = run(pytester, flaky(count=2))
    assert outcomes(done) == {"passed": 2, "rerun": 2}
    assert done.ret == 1
    done.stdout.fnmatch_lines(["2 tests needed a second run, and more than one is a failure"])


TIMEOUTS = [
    "pytest.fail('Timeout (>300.0s) from pytest-timeout.')",
    "raise AssertionError('60 s passed before: the group trains')",
    "raise TimeoutError('quorum: no answer')",
    "raise subprocess.TimeoutExpired('make', 3)",
    "raise RuntimeError('allreduce timed out after 5 s')",
]


def test_a_timeout_has_no_second_run(pytester: pytest.Pytester) -> None:
    tests = [f"def test_{i}(): {failure}\n" for i, failure in enumerate(TIMEOUTS)]
    done = run(pytester, "\n".join(["import subprocess", "import pytest", *tests]))
    assert outcomes(done) == {"failed": len(TIMEOUTS)}


def test_a_log_that_mentions_timeouts_is_not_a_timeout(pytester: pytest.Pytester) -> None:
    done = run(
        pytester, flaky(failure=r"raise RuntimeError('group 1 ended with 1\nlog:\nTimeoutError: timed out')")
    )
    assert outcomes(done) == {"passed": 1, "rerun": 1}


def test_reruns_can_be_switched_off(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RERUNS", "0")
    assert outcomes(run(pytester, flaky())) == {"failed": 1}


def test_without_the_plugin_there_are_no_second_runs_and_a_line_reports_that(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(flaky())
    done = run_again(pytester, "-p", "no:rerunfailures", "-p", "no:pytest_rerunfailures")
    assert outcomes(done) == {"failed": 1}
    done.stdout.fnmatch_lines(["no test has a second run: the plugin pytest-rerunfailures is not installed"])


@pytest.mark.parametrize("there", [1, 2])
def test_a_test_states_the_number_of_devices_it_needs(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, there: int
) -> None:
    monkeypatch.setattr(policy, "devices", lambda: there)
    done = run(
        pytester,
        """
        import pytest
        @pytest.mark.devices(2)
        def test_two(): pass
        @pytest.mark.devices(3)
        def test_three(): assert False
        def test_one(): pass
        """,
    )
    assert outcomes(done) == {"passed": there, "deselected": 3 - there}
    expected = [
        "*2 CUDA devices (there is one); 1 tests need 3*",
        "deselected: 1 tests need 3 CUDA devices (there are 2)",
    ]
    done.stdout.fnmatch_lines([expected[there - 1]])


def test_tests_that_cannot_run_here_are_reported_in_one_line(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", "true")
    monkeypatch.setitem(policy.NEEDS, "device", ("a CUDA device", lambda: "none answers"))
    monkeypatch.setitem(policy.NEEDS, "hosts", ("network namespaces", lambda: None))
    done = run(
        pytester,
        """
        import pytest
        @pytest.mark.device
        @pytest.mark.parametrize("i", range(3))
        def test_device(i): assert False
        @pytest.mark.hosts
        def test_hosts(): pass
        """,
    )
    assert done.ret == 0
    assert outcomes(done) == {"passed": 1, "deselected": 3}
    done.stdout.fnmatch_lines(["deselected: 3 tests need a CUDA device (none answers)"])


def test_a_run_of_nothing_else_passes(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(policy.NEEDS, "device", ("a CUDA device", lambda: "none answers"))
    done = run(pytester, "import pytest\n@pytest.mark.device\ndef test_device(): assert False")
    assert done.ret == pytest.ExitCode.OK
    done.stdout.fnmatch_lines(["deselected: 1 tests need a CUDA device (none answers)"])
    done = run_again(pytester, "-k", "no_such_test")
    assert done.ret == pytest.ExitCode.NO_TESTS_COLLECTED, "a name that no test has"


SKIPS = """
import pytest
def test_skips(): pytest.skip("no such tool")
@pytest.mark.skipif(True, reason="another system")
def test_marked(): pass
@pytest.mark.xfail
def test_fails(): assert False
"""


@pytest.mark.parametrize("strict", [False, True])
def test_any_other_skip_fails_the_run_of_ci(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, strict: bool
) -> None:
    if strict:
        monkeypatch.setenv("CI", "true")
    pytester.makepyfile(test_module="import pytest; pytest.skip('not on this host', allow_module_level=True)")
    done = run(pytester, SKIPS)
    assert outcomes(done) == {"skipped": 3, "xfailed": 1}
    assert done.ret == (1 if strict else 0)
    if strict:
        done.stdout.fnmatch_lines_random(
            ["skipped under CI=true:", "*no such tool*", "*another system*", "*not on this host*"]
        )


def test_a_build_for_cuda_does_not_count_as_a_device(pytester: pytest.Pytester) -> None:
    done = run(pytester, "import pytest\n@pytest.mark.no_device\ndef test_it(): pass")
    assert outcomes(done) == ({"deselected": 1} if torch.accelerator.is_available() else {"passed": 1})
