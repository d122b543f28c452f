"""A pytest plugin for `make test-all`: limits the duration of a run, and orders the tests by a seed.

SEED=N seeds `random` and PyTorch for each test, in any run. NIGHT_UNTIL=T, in seconds of time.monotonic(),
skips each test that might not end by then. Slow tests run before the others, so that there is time for them;
those marked `slow(first=True)` run first, in every run. The seed chooses the first of the slow tests, and the
first of the others.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Iterable
from typing import TypeVar

import pytest

T = TypeVar("T")

# The limit of a test, unless its mark `slow(minutes=...)` names another.
SLOW_MINUTES, OTHER_MINUTES = 1.5, 0.5


def pytest_configure(config: pytest.Config) -> None:
    if until := os.environ.get("NIGHT_UNTIL"):
        config.pluginmanager.register(Bounded(float(until), os.environ.get("SEED", "")))


def pytest_report_header() -> str | None:
    seed = os.environ.get("SEED")
    return f"seed {seed} (SEED={seed} repeats it)" if seed else None


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    """Seeds each test by its own name, so that it draws the same numbers when it runs alone."""
    if seed := os.environ.get("SEED"):
        random.seed(f"{seed}:{request.node.nodeid}")
        # Unseeded, PyTorch starts with the same numbers in every process.
        if torch := sys.modules.get("torch"):
            torch.manual_seed(random.getrandbits(63))


def todays(seed: int) -> int:
    """Returns the seed of a test's random histories: ``seed``, or one derived from SEED (as in `make
    test-all`).
    """
    return random.getrandbits(32) if os.environ.get("SEED") else seed


def often(histories: int) -> int:
    """Returns how many random histories a test plays: all if SEED is set, as by `make test-all`, else a
    twentieth.
    """
    return histories if os.environ.get("SEED") else histories // 20


def rotated(items: Iterable[T], seed: str) -> list[T]:
    items = list(items)
    start = random.Random(seed).randrange(len(items)) if items else 0
    return items[start:] + items[:start]


def longest_s(item: pytest.Item) -> float:
    slow = item.get_closest_marker("slow")
    return 60 * (OTHER_MINUTES if slow is None else slow.kwargs.get("minutes", SLOW_MINUTES))


def comes_later(item: pytest.Item) -> bool:
    slow = item.get_closest_marker("slow")
    return slow is None or not slow.kwargs.get("first", False)


class Bounded:
    def __init__(self, until: float, seed: str) -> None:
        self.until, self.seed = until, seed
        self.left = 0

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        slow = [item for item in items if item.get_closest_marker("slow")]
        others = [item for item in items if not item.get_closest_marker("slow")]
        items[:] = sorted(rotated(slow, self.seed), key=comes_later) + rotated(others, self.seed)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        if time.monotonic() + longest_s(item) <= self.until:
            return None
        self.left += 1
        # The previous test has kept the fixtures that it shares with this one; end those that the next does
        # not need.
        item.session._setupstate.teardown_exact(nextitem)
        return True

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_line(f"not run for lack of time: {self.left} tests")
