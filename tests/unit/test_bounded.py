"""Tests of the plugin tests/bounded.py: test runs with a seed and a time limit.

All tests but `test_rotated` call pytest in this process, on a separate suite.
"""

from __future__ import annotations

import random
import re
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from tests.bounded import rotated

ROOT = Path(__file__).resolve().parents[2]
pytest_plugins = ["pytester"]

SUITE = """
import random, time
import pytest, torch
from tests.bounded import todays

@pytest.fixture(scope="module")
def shared():
    yield
    print("given back")

def test_draws(shared): print("drew", random.random(), torch.seed, todays(3))
def test_other(shared): pass
@pytest.mark.slow
def test_slow(shared): pass
@pytest.mark.slow(minutes=10)
def test_slower(shared): pass
"""


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NIGHT_UNTIL", "SEED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


class Torch(ModuleType):
    """Replaces PyTorch in the inner run, which would otherwise seed the PyTorch of this process."""

    seed: int | None = None

    def manual_seed(self, n: int) -> None:
        self.seed = n


def run(pytester: pytest.Pytester, *args: str, suite: str = SUITE) -> pytest.RunResult:
    pytester.makepyfile(suite)
    pytester.makeini("[pytest]\nmarkers = slow")
    state = random.getstate()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torch", Torch("torch"))
        # In this process Go's runtime turns SIGSEGV into a panic; faulthandler would replace the runtime's
        # handler.
        done = pytester.runpytest_inprocess("-p", "no:faulthandler", "-p", "tests.bounded", "-v", "-s", *args)
    random.setstate(state)
    return done


def order(done: pytest.RunResult) -> list[str]:
    return re.findall(r"::test_(\w+)", done.stdout.str())


def test_without_settings_nothing_changes(pytester: pytest.Pytester) -> None:
    done = run(pytester)
    done.assert_outcomes(passed=4)
    assert order(done) == ["draws", "other", "slow", "slower"]
    assert "seed" not in done.stdout.str()


def test_slow_tests_are_first_and_a_seed_chooses_the_first_of_each_kind(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NIGHT_UNTIL", str(time.monotonic() + 3600))
    orders = []
    for seed in ("3", "4"):  # chosen so that the two orders begin with different tests
        monkeypatch.setenv("SEED", seed)
        done = run(pytester)
        done.assert_outcomes(passed=4)
        found = order(done)
        assert {*found[:2]} == {"slow", "slower"}
        orders.append(found)
    assert {found[0] for found in orders} == {"slow", "slower"}
    assert {found[2] for found in orders} == {"draws", "other"}


@pytest.mark.parametrize(
    ("minutes", "expected"),
    [(60, 4), (5, 3), (1, 2), (0.1, 0)],
    ids=["all", "not the slower", "no slow ones", "none"],
)
def test_tests_that_would_not_end_in_time_are_skipped(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, minutes: float, expected: int
) -> None:
    monkeypatch.setenv("NIGHT_UNTIL", str(time.monotonic() + 60 * minutes))
    done = run(pytester)
    done.assert_outcomes(passed=expected)
    assert done.ret == 0
    done.stdout.fnmatch_lines([f"not run for lack of time: {4 - expected} tests"])
    assert done.stdout.str().count("given back") == (1 if expected else 0)


def test_a_seed_is_printed_and_repeats_what_a_test_draws(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drawn(*args: str) -> str:
        done = run(pytester, *args)
        (found,) = re.findall(r"drew (.+)", done.stdout.str())
        return found

    assert drawn().endswith(" None 3"), "without a seed"
    monkeypatch.setenv("SEED", "7")
    run(pytester).stdout.fnmatch_lines(["seed 7 (SEED=7 repeats it)"])
    assert drawn() == drawn("-k", "draws")
    first = drawn()
    monkeypatch.setenv("SEED", "8")
    assert drawn() != first


def test_rotated() -> None:
    assert rotated([], "1") == []
    found = {tuple(rotated("abc", str(seed))) for seed in range(50)}
    assert found == {("a", "b", "c"), ("b", "c", "a"), ("c", "a", "b")}


def test_tests_that_run_each_time_are_first(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = "".join(f"@pytest.mark.slow\ndef test_slow_{n}(): pass\n" for n in range(3))
    each_time = "@pytest.mark.slow(first=True)\ndef test_wheel(): pass\n"
    monkeypatch.setenv("NIGHT_UNTIL", f"{time.monotonic() + 1000:.0f}")
    for seed in ("1", "2"):
        monkeypatch.setenv("SEED", seed)
        done = run(pytester, suite=f"import pytest\n{suite}{each_time}def test_other(): pass\n")
        done.assert_outcomes(passed=5)
        assert order(done)[0] == "wheel"
