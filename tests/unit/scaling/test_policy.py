"""The policy of the number of groups: a table of its decisions, and jobs whose speeds follow a curve."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import pytest

from torchft.scaling import policy as module
from torchft.scaling.policy import Decision, Policy, Seen, allowed_numbers, brings

LOOK_SEC = 0.5
START_SEC = 8.0  # of a group
TOLD_SEC = 1.6  # between two heartbeats


class Job:
    """A job with a fixed global batch, whose speed in steps per second is a function of the groups.

    Args:
        speed: the function.
        numbers: allowed numbers of groups.
        wanted: number of groups at the begin.
        noise: standard deviation of the speed in each half second, as a part of it.
        seed: of the noise.
    """

    def __init__(
        self,
        speed: Callable[[int], float],
        numbers: Sequence[int],
        wanted: int,
        noise: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.policy = Policy(numbers)
        self.now = 1000.0
        self.wanted = self.groups = wanted
        self.lost = 0  # groups that a scheduler has preempted
        self.decisions: list[Decision] = []
        self._speed = speed
        self._noise = noise
        self._random = random.Random(seed)
        self._quorum = 1
        self._done = 0.0
        self._told = 0
        self._tells_at = self._joins_at = 0.0

    @property
    def changes(self) -> list[int]:
        """The numbers that were set, one after the other."""
        return [d.groups for before, d in zip([None, *self.decisions], self.decisions) if changes(before, d)]

    def settle(self) -> None:
        """Runs until the policy stays with a number, for half a day at most."""
        until = self.now + 43_200
        while self.now < until and not (self.decisions and " stay:" in self.decisions[-1].reason):
            self._tick()

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / LOOK_SEC)):
            self._tick()

    def _tick(self) -> None:
        self.now += LOOK_SEC
        wanted = self.wanted - self.lost
        if self.groups < wanted and not self._joins_at:
            self._joins_at = self.now + START_SEC
        if self.groups > wanted or (self._joins_at and self.now >= self._joins_at):
            self.groups, self._joins_at, self._quorum = wanted, 0.0, self._quorum + 1
        noise = max(0.05, self._random.gauss(1.0, self._noise))
        self._done += LOOK_SEC * (self._speed(self.groups) if self.groups else 0.0) * noise
        if self.now >= self._tells_at:
            self._told, self._tells_at = int(self._done), self.now + TOLD_SEC
        decision = self.policy.look(self.now, Seen(self.wanted, self.groups, self._quorum, self._told))
        if decision is not None:
            self.decisions.append(decision)
            self.wanted = decision.groups


def changes(before: Decision | None, decision: Decision) -> bool:
    return " -> " in decision.reason and (before is None or before.groups != decision.groups)


def linear(n: int) -> float:
    return 3.0 * n


def saturating(n: int) -> float:
    return 20 / (0.12 + 0.88 / n)


def cores(n: int) -> float:
    """Two cores: more groups share them, and cost a little."""
    return 10 * min(n, 2) / (1 + 0.05 * max(0, n - 2))


def cliff(n: int) -> float:
    return 2.0 * n if n <= 5 else 0.4


def slow_steps(n: int) -> float:
    """A step takes from two to seven seconds."""
    return n / (6 + 0.9 * n)


def best(speed: Callable[[int], float], numbers: Sequence[int]) -> int:
    """The largest number up to which each addition brings its part."""
    for low, high in itertools.pairwise(numbers):
        if brings(low, speed(low), high, speed(high)) < module.SHARE:
            return low
    return numbers[-1]


CURVES = [linear, saturating, cores, cliff, slow_steps]


@pytest.mark.parametrize("speed", CURVES)
@pytest.mark.parametrize("noise", [0.0, 0.2])
@pytest.mark.parametrize("sizes", ["all", "powers_of_two"])
def test_it_finds_the_best_number(speed: Callable[[int], float], noise: float, sizes: str) -> None:
    numbers = allowed_numbers(1, 8, sizes)
    wanted = numbers.index(best(speed, numbers))
    for seed in range(5):
        job = Job(speed, numbers, numbers[0], noise, seed)
        job.settle()
        assert abs(numbers.index(job.wanted) - wanted) <= 1, (seed, job.decisions)
        assert len(job.changes) <= 2 * len(numbers), (seed, job.decisions)
        assert set(job.changes) <= set(numbers)
        assert noise > 0 or job.wanted == numbers[wanted], job.decisions


def test_a_job_whose_speed_varies_by_more_than_half_ends_seldom_elsewhere() -> None:
    """The largest number of a curve is worth hardly less than the limit, so some searches go too far."""
    off = []
    for speed, sizes, seed in itertools.product(CURVES, ("all", "powers_of_two"), range(6)):
        numbers = allowed_numbers(1, 8, sizes)
        job = Job(speed, numbers, numbers[0], 0.6, seed)
        job.settle()
        assert len(job.changes) <= 2 * len(numbers)
        if abs(numbers.index(job.wanted) - numbers.index(best(speed, numbers))) > 1:
            off.append((speed.__name__, sizes, seed))
    assert len(off) <= 1, off


@pytest.mark.parametrize("speed", CURVES)
@pytest.mark.parametrize("begin", [4, 7, 8])
def test_from_more_groups_it_first_looks_whether_fewer_do(speed: Callable[[int], float], begin: int) -> None:
    numbers = allowed_numbers(1, 8)
    job = Job(speed, numbers, begin)
    job.run(3000)
    assert job.wanted == best(speed, numbers), job.decisions
    assert len(job.changes) <= 2 * len(numbers)


def test_each_decision_has_its_figures() -> None:
    job = Job(cores, range(1, 9), 1)
    job.run(600)
    assert [decision.groups for decision in job.decisions] == [2, 3, 2, 2]
    first, second, third, fourth = (decision.reason for decision in job.decisions)
    assert first.startswith("1 -> 2 groups: ") and first.endswith(" steps/s with 1")
    assert second.startswith("2 -> 3 groups: ") and "an added group brings " in second
    assert third.startswith("3 -> 2 groups: ") and third.endswith("% of its share, less than 60%")
    assert fourth.startswith("2 groups stay: ") and " with 2, " in fourth and " with 3: " in fourth


def test_a_change_is_measured_for_a_while_and_a_number_that_was_not_worth_it_rests() -> None:
    job = Job(cores, range(1, 9), 1)
    times = []
    for _ in range(10_000):
        before = len(job.decisions)
        job.run(LOOK_SEC)
        times += [job.now] if len(job.decisions) > before else []
    gaps = [later - time for time, later in itertools.pairwise(times)]
    assert gaps[0] > START_SEC + module.SETTLE_SEC and gaps[1] > START_SEC + module.SETTLE_SEC
    assert gaps[2] > module.SETTLE_SEC  # two are measured again
    assert gaps[3] > module.AGAIN_SEC  # then it tries three again
    assert job.changes == [2, 3, 2, 3, 2]


def test_a_preempted_group_and_its_return_change_nothing() -> None:
    job = Job(saturating, range(2, 9), 2)
    job.run(2000)
    found, decisions = job.wanted, len(job.decisions)
    for lost in (1, 2, found):
        job.lost = lost
        job.run(200)
        job.lost = 0
        job.run(200)
    assert (job.wanted, len(job.decisions)) == (found, decisions)
    job = Job(linear, range(2, 9), 2)
    for _ in range(60):  # groups come and go all the time, and it climbs
        job.lost = 1
        job.run(20)
        job.lost = 0
        job.run(100)
    assert job.wanted == 8 and min(job.changes) > 2


def test_a_number_that_cannot_be_kept_is_given_up() -> None:
    job = Job(linear, range(1, 5), 1)
    for _ in range(200):  # the third group fails as soon as it trains
        job.run(12)
        job.lost = 1 if job.groups > 2 else 0
    assert job.wanted == 2 and max(job.changes) == 3
    assert any("3 did not train for 600 s of the attempt" in d.reason for d in job.decisions)


def test_a_group_that_waits_for_a_machine_is_waited_for() -> None:
    job = Job(linear, range(1, 5), 1)
    while job.wanted < 3:
        job.run(1)
    job.lost = 1
    job.run(5000)
    assert job.wanted == 3
    job.lost = 0
    job.run(1000)
    assert job.wanted == 4


def test_a_number_set_by_hand_stays_until_it_begins_anew() -> None:
    job = Job(cores, range(1, 9), 1)
    job.run(600)
    job.wanted = 6
    job.run(5000)
    assert job.wanted == 6
    assert job.decisions[-1] == Decision(6, "6 groups, set by hand: this number stays")
    job.policy.begin()
    job.run(3000)
    assert job.wanted == 2


@pytest.mark.parametrize(("begin", "first"), [(1, 2), (3, 2), (5, 4), (9, 8)])
def test_from_a_number_that_is_not_allowed_it_goes_to_the_next_one_below(begin: int, first: int) -> None:
    job = Job(linear, [2, 4, 8], begin)
    job.run(1)
    assert job.decisions == [
        Decision(first, f"{begin} -> {first} groups: {begin} is none of the allowed numbers")
    ]


@pytest.mark.parametrize(
    ("low", "low_rate", "high", "high_rate", "part"),
    [
        (1, 1.0, 2, 2.0, 1.0),
        (1, 1.0, 2, 1.6, 0.6),
        (4, 2.0, 5, 2.5, 1.0),
        (4, 2.0, 8, 3.0, 0.5),
        (2, 2.0, 3, 1.0, -1.0),
    ],
)
def test_what_an_added_group_brings(
    low: int, low_rate: float, high: int, high_rate: float, part: float
) -> None:
    assert brings(low, low_rate, high, high_rate) == pytest.approx(part)


@pytest.mark.parametrize(
    ("least", "most", "sizes", "numbers"),
    [
        (2, 5, "all", (2, 3, 4, 5)),
        (1, 9, "powers_of_two", (1, 2, 4, 8)),
        (3, 8, "powers_of_two", (4, 8)),
        (2, 8, "6/2/2", (2, 6)),
        (4, 4, "all", (4,)),
    ],
)
def test_the_allowed_numbers(least: int, most: int, sizes: str, numbers: tuple[int, ...]) -> None:
    assert allowed_numbers(least, most, sizes) == numbers


@pytest.mark.parametrize(
    ("least", "most", "sizes", "error"),
    [
        (3, 2, "all", "3:2 groups are not allowed; allowed: MIN:MAX with MIN of at least 1"),
        (0, 2, "all", "0:2 groups are not allowed"),
        (5, 7, "powers_of_two", "sizes='powers_of_two': none is in 5:7"),
        (2, 8, "2/16", "sizes='2/16': 16 is outside of 2:8"),
        (2, 8, "odd", "sizes='odd' is not allowed; allowed: all, powers_of_two, or numbers of groups"),
        (2, 8, "", "sizes='' is not allowed"),
    ],
)
def test_numbers_that_are_not_allowed(least: int, most: int, sizes: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        allowed_numbers(least, most, sizes)
