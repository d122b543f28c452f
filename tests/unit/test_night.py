"""The schedule of `make test-all`: the time of each part, and the report at the end."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python" / "build"))
from lanes import Part, Result  # noqa: E402
from night import CHAOS, FUZZ_S, OVER_S, fuzz_targets, judged, page, plan, seconds_of, unplanned  # noqa: E402

TARGETS = [("./heal", "FuzzAnswers"), ("./heal", "FuzzRequests"), ("./manager", "FuzzSession")]

PYTEST = """\
tests/a.py ..F                                                           [100%]
=========================== short test summary info ============================
FAILED tests/process/test_chaos.py::test_x[kill -9] - AssertionError: group 1
ERROR tests/unit/test_b.py::test_y - OSError: no
not run for lack of time: 3 tests
deselected: 54 tests need a CUDA device
============= 1 failed, 20 passed, 2 skipped, 1 error in 12.50s ==============
"""


def test_a_time_is_a_number_with_a_unit() -> None:
    assert [seconds_of(text) for text in ("90s", "30m", "1.5h", "1h30m")] == [90, 1800, 5400, 5400]


@pytest.mark.parametrize("text", ["", "30", "m", "30 m", "-5m", "0s", "1d", "30mx"])
def test_anything_else_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="allowed is a number with s, m or h"):
        seconds_of(text)


def test_all_fuzz_targets_are_known() -> None:
    """Their number is fixed here, because a target that is not found is silently not run."""
    found = fuzz_targets()
    assert len(found) == 14
    assert ("./internal/wire", "FuzzDelivery") in found
    assert len(set(found)) == len(found)


def test_pytest_gets_the_whole_time_and_no_second_runs_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RERUNS", "1")
    assert plan(1800, 20261122, 1e5, TARGETS)[0].env["RERUNS"] == "1"
    monkeypatch.delenv("RERUNS")
    tests = plan(1800, 20261122, 1e5, TARGETS)[0]
    assert tests.name == "pytest"
    assert tests.env == {"SEED": "20261122", "RERUNS": "0", "FORK_SERVER": "0", "NIGHT_UNTIL": "100000"}
    assert tests.command[tests.command.index("-m", 3) + 1] == ""
    tests = plan(600, 20261122, 1e5, TARGETS)[0]
    assert tests.command[tests.command.index("-m", 3) + 1] == "slow", "the others are those of make test"


@pytest.mark.parametrize("minutes", [10, 30, 120])
def test_the_parts_of_go_fit_in_the_time(minutes: float) -> None:
    """The parts run one after another: those with a time limit, and the race detector, which has none."""
    _, *parts = plan(60 * minutes, 20261122, 0, fuzz_targets())
    names = [p.name.split("-")[0] for p in parts]
    more = ["oldest"] if minutes >= 60 else []
    # 20261122 begins with the first kind.
    assert list(dict.fromkeys(names)) == ["race", "machines", "sim", "late", *more, "chaos", "fuzz", "soak"]
    assert names.count("fuzz") == len(fuzz_targets())
    fixed = [p for p in parts if p.name not in ("machines", "sim", "late")]  # this kind has its own day
    assert sum(p.needs_s if p.wants_s is None else p.wants_s for p in fixed) < 60 * minutes


def test_a_fuzz_target_has_half_a_minute_where_there_is_time() -> None:
    fuzz = [p for p in plan(1800, 1, 0, fuzz_targets()) if p.name.startswith("fuzz")]
    assert {p.wants_s for p in fuzz} == {FUZZ_S}


def test_each_day_begins_with_another_part() -> None:
    orders = [
        [p.name for p in plan(7200, seed, 0, TARGETS) if p.name.startswith(("fuzz", "chaos"))]
        for seed in range(len(CHAOS))
    ]
    assert len({tuple(order) for order in orders}) == len(CHAOS)
    assert len({tuple(sorted(order)) for order in orders}) == 1
    for seed in range(2):
        _, race, first, *_ = plan(600, seed, 0, TARGETS)
        assert race.name == "race" and "FULL" not in race.env, "the others have a turn, too"
        assert first.name.startswith(("machines", "chaos")[seed])
    assert plan(600, 5, 0, TARGETS) == plan(600, 5, 0, TARGETS)


def test_the_report_lists_parts_that_had_no_time() -> None:
    def left_out(minutes: float) -> set[str]:
        parts = plan(60 * minutes, 1, 0, TARGETS)
        return {r.part.name.split("-")[0] for r in unplanned(parts, 1, TARGETS) if r.status is None}

    assert left_out(10) == {"chaos", "oldest", "sim"}  # sim: the simulations with planted mistakes
    assert left_out(120) == left_out(240) == set()
    kinds = [p.name for p in plan(7200, 1, 0, TARGETS) if p.name.startswith("chaos")]
    assert len(kinds) == len(CHAOS)


def test_a_run_of_ten_minutes_ends_within_twelve() -> None:
    assert OVER_S + 20 < 120  # processes have 20 s to end after a signal


def result(name: str, status: int | None, *command: str, ended: bool = False, cwd: Path = ROOT) -> Result:
    part = Part(name, command, cwd=cwd, env={"SEED": "7", "NIGHT_UNTIL": "9"} if name == "pytest" else {})
    return Result(part, command, 61.0, status, ended)


def test_the_report_names_failures_and_the_commands_that_repeat_them() -> None:
    go = ROOT / "go"
    results = [
        result("pytest", 1, sys.executable, "-u", "-m", "pytest"),
        result("soak", 0, "go", "test", "./sim", cwd=go),
        result("fuzz-heal-FuzzAnswers", 1, "go", "test", "-trimpath", "./heal", cwd=go),
        result(
            "chaos-gloo", 1, sys.executable, "-u", "tests/process/chaos_faults.py", "--seed=7", ended=True
        ),
        result("race", None),
    ]
    logs = {
        "pytest": PYTEST,
        "soak": "10s: seeds 7 to 9, 3000 quorums\n12s: seeds 7 to 11, 4000 quorums, no rule broken\nPASS\n",
        "fuzz-heal-FuzzAnswers": "fuzz: elapsed: 3s, execs: 12 (4/sec)\n--- FAIL: FuzzAnswers (3.00s)\n"
        "    Failing input written to testdata/fuzz/FuzzAnswers/abc\n"
        "    To re-run:\n    go test -run=FuzzAnswers/abc\n",
        "chaos-gloo": "[    7.0 s] 3: kill -9: 0.1 s\n",
    }
    lines = page(results, logs, "Night of 2026-11-22, seed 7", 125.0).splitlines()
    assert lines[0] == "# Night of 2026-11-22, seed 7"
    assert "| pytest | 1m01s | 1 failed, 20 passed, 2 skipped, 1 error in 12.50s | FAILED |" in lines
    assert "| soak | 1m01s | 12s: seeds 7 to 11, 4000 quorums, no rule broken | passed |" in lines
    assert "| race | 1m01s |  | left out: no time |" in lines
    assert "not run for lack of time: 3 tests" in lines
    assert "deselected: 54 tests need a CUDA device" in lines
    assert "FAILED tests/process/test_chaos.py::test_x[kill -9]: AssertionError: group 1" in lines
    assert (
        "    SEED=7 .venv/bin/python -m pytest -m '' 'tests/process/test_chaos.py::test_x[kill -9]'" in lines
    )
    assert "fuzz-heal-FuzzAnswers: --- FAIL: FuzzAnswers" in lines
    assert "    cd go && go test -run=FuzzAnswers/abc ./heal" in lines
    assert "chaos-gloo took too long and was ended" in lines
    assert "    .venv/bin/python -u tests/process/chaos_faults.py --seed=7" in lines
    assert lines[-1] == "4 failed, 21 passed in 125s (2m05s)"


@pytest.mark.parametrize(
    ("log", "failed"),
    [
        ("--- FAIL: FuzzX (10.07s)\n    context deadline exceeded\nFAIL\nexit status 1\n", False),
        ("--- FAIL: FuzzX (3.00s)\n    x_test.go:9: context deadline exceeded\nFAIL\n", True),
        ("--- FAIL: FuzzX (3.00s)\n    Failing input written to testdata/a\nFAIL\n", True),
        ("panic: boom\n", True),
    ],
)
def test_a_fuzzer_that_only_ended_at_its_time_has_passed(log: str, failed: bool) -> None:
    assert judged(result("fuzz-rpc-FuzzX", 1), log).failed == failed
    assert judged(result("race", 1), log).failed


def test_a_night_without_failures() -> None:
    text = page([result("soak", 0)], {"soak": "5s: seeds 1 to 2\n"}, "Night", 5.0)
    assert "Failed" not in text
    assert text.endswith("1 passed in 5s (5s)")


def test_a_failed_part_fails_the_run() -> None:
    text = page([result("pytest", 3)], {"pytest": "INTERNALERROR> KeyError\n"}, "Night", 5.0)
    assert text.endswith("1 failed, 0 passed in 5s (5s)")
    assert "pytest: status 3" in text
