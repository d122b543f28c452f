"""How many replica groups train best: a policy without IO, which takes the time as an argument.

The global batch is the same for each number of groups, so samples a second are in proportion to steps a
second, and only the ratio of two rates counts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import stdev

# An added group stays if it brings at least this part of what each group brought before.
SHARE = 0.6
# After a change of the quorum the first steps are slow: connections, caches, compilations.
SETTLE_SEC = 15.0
# A lighthouse hears of a step up to 1.7 s late, so a shorter span would say little.
_SPAN_SEC = 5.0
_BLOCKS = 8  # of spans, whose rates give the standard error
_MOST_SPANS = 1024  # a noisier job is judged by what it has shown so far
# The standard error of a rate that is good enough, as a part of what one group brings: a sixth of the
# distance between SHARE and what the last one brought, within these limits. A curve nears SHARE slowly.
_LEAST_PRECISION, _FIRST_PRECISION, _MOST_PRECISION = 0.08, 0.04, 0.02
# Or this many standard errors from SHARE are this far or further.
_DOUBT, _FAR = 4.0, 0.3
_CRAWLS = 0.8  # below this part of the rate before, more groups are slower beyond doubt
# A larger number of groups that trains again and again, and is interrupted for this long in all, is given up.
_INTERRUPTED_SEC = 600.0
AGAIN_SEC = 3600.0  # after this time a number that was not worth it is tried again


@dataclass(frozen=True)
class Seen:
    """What is seen of a job at one time.

    Attributes:
        wanted: number of groups that was asked for.
        groups: number of groups in the quorum that have healed.
        quorum: id of the quorum.
        step: the largest step of its members.
    """

    wanted: int
    groups: int
    quorum: int
    step: int


@dataclass(frozen=True)
class Decision:
    """The number of groups from now on, which may be the present one, and why."""

    groups: int
    reason: str


def allowed_numbers(least: int, most: int, sizes: str = "all") -> tuple[int, ...]:
    """The numbers of groups that are allowed, ascending.

    Args:
        least: smallest number.
        most: largest number.
        sizes: which of them: ``"all"``, ``"powers_of_two"``, or a list such as ``"2/4/8"``.

    Raises:
        ValueError: the range or ``sizes`` is not allowed, or they have no number in common.
    """
    if not 1 <= least <= most:
        raise ValueError(
            f"{least}:{most} groups are not allowed; allowed: MIN:MAX with MIN of at least 1 and MAX not "
            "below it"
        )
    if sizes == "all":
        return tuple(range(least, most + 1))
    if sizes == "powers_of_two":
        found = [1 << i for i in range(most.bit_length()) if least <= 1 << i <= most]
    elif re.fullmatch(r"[0-9]+(/[0-9]+)*", sizes):
        found = sorted({int(size) for size in sizes.split("/")})
        if outside := [n for n in found if not least <= n <= most]:
            raise ValueError(f"sizes={sizes!r}: {outside[0]} is outside of {least}:{most}")
    else:
        raise ValueError(
            f"sizes={sizes!r} is not allowed; allowed: all, powers_of_two, or numbers of groups such as 2/4/8"
        )
    if not found:
        raise ValueError(f"sizes={sizes!r}: none is in {least}:{most}")
    return tuple(found)


def brings(low: int, low_rate: float, high: int, high_rate: float) -> float:
    """What each of the groups between two numbers brings, as a part of what each of the lower number does."""
    return (high_rate / low_rate - 1) * low / (high - low)


class _Measurement:
    """The rate of steps of one number of groups, in spans of time in which the quorum stood."""

    def __init__(self) -> None:
        self._spans: list[tuple[float, int]] = []  # seconds and steps
        self._quorum: int | None = None
        self._settled = 0.0
        self._first = 0  # the step when it had settled
        self._step = 0
        self._began: tuple[float, int] | None = None  # the present span

    def interrupt(self) -> None:
        """The number of groups is another one. The spans before stay."""
        self._quorum = None

    def look(self, now: float, quorum: int, step: int) -> bool:
        """Returns whether a further span is complete."""
        if quorum != self._quorum:
            self._quorum, self._settled, self._began = quorum, now + SETTLE_SEC, None
        new, self._step = step != self._step, step
        if now < self._settled:
            self._first = step
        elif new and self._began is None:
            self._began = (now, step)
        elif new and self._began is not None and now - self._began[0] >= _SPAN_SEC:
            self._spans.append((now - self._began[0], step - self._began[1]))
            self._began = (now, step)
            return True
        return False

    @property
    def rate(self) -> float:
        """Steps per second; above 0, since each span has a step."""
        return sum(steps for _, steps in self._spans) / sum(seconds for seconds, _ in self._spans)

    @property
    def error(self) -> float:
        """The standard error of the rate, as a part of it; 0 if it has taken long enough."""
        size = len(self._spans) // _BLOCKS
        if size == 0:
            return math.inf
        blocks = [self._spans[i * size : (i + 1) * size] for i in range(_BLOCKS)]
        rates = [sum(steps for _, steps in block) / sum(seconds for seconds, _ in block) for block in blocks]
        return 0.0 if len(self._spans) >= _MOST_SPANS else stdev(rates) / math.sqrt(_BLOCKS) / self.rate

    def at_most(self, now: float) -> float:
        """The largest rate that the steps since it has settled allow; infinite in the first spans."""
        seconds = now - self._settled
        return math.inf if seconds < _BLOCKS * _SPAN_SEC else (self._step - self._first + 1) / seconds


class Policy:
    """Finds the number of groups: the largest up to which each added group brings :data:`SHARE` of its share.

    It first looks whether fewer groups than at its begin do as well, then climbs, one allowed number after
    the other, and goes back from one that is not worth it. There it measures again before it stays: in a
    noisy job, the rate before may have stopped the climb because it was too large.

    1. All numbers that it decides for are allowed ones, so none is below the smallest.
    2. It compares rates of times in which as many groups trained as were wanted. While groups are lost or
       start, it waits: a preemption changes nothing, nor does the return of the group.
    3. A number that something else sets stays, until :meth:`begin`.

    Args:
        numbers: the allowed numbers, ascending.
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = tuple(numbers)
        self.begin()

    def begin(self) -> None:
        """Begins anew, with the number that :meth:`look` sees next."""
        self._wanted: int | None = None
        self._by_hand = False
        self._down = True  # whether fewer are to be tried
        self._tried_from: int | None = None  # the number before, while the present one is tried
        self._rates: dict[int, float] = {}
        self._refused: dict[int, float] = {}  # when a number was found not to be worth it
        self._precision = _FIRST_PRECISION
        self._rests_until = -math.inf
        self._measurement = _Measurement()
        self._trained = False  # whether as many groups as are wanted have trained
        self._interrupted = 0.0  # seconds, of a larger number that is tried
        self._looked = 0.0

    def look(self, now: float, seen: Seen) -> Decision | None:
        """What is to be done at a time, in seconds of any clock; None: nothing."""
        since, self._looked = now - self._looked, now
        if self._wanted is None:
            self._wanted = seen.wanted
        if self._by_hand:
            return None
        n = self._wanted
        if seen.wanted != n:
            self._by_hand = True
            return Decision(seen.wanted, f"{_groups(seen.wanted)}, set by hand: this number stays")
        if n not in self._numbers:
            nearest = max((m for m in self._numbers if m < n), default=self._numbers[0])
            return self._set(nearest, None, f"{n} is none of the allowed numbers")
        if seen.groups != n:
            self._measurement.interrupt()
            return self._give_up(now, since, n, seen.groups)
        self._trained = True
        if now < self._rests_until:
            return None
        further = self._measurement.look(now, seen.quorum, seen.step)
        before = self._tried_from
        if before is not None and before < n:
            at_most = self._measurement.at_most(now)
            if at_most < _CRAWLS * self._rates[before]:
                return self._judge(now, n, at_most)
        if further and self._clear(n, self._measurement.error, before):
            return self._judge(now, n, self._measurement.rate)
        return None

    def _clear(self, n: int, error: float, before: int | None) -> bool:
        """Whether the error of the present rate is small enough for a decision."""
        if error <= self._precision * self._finest(n):
            return True
        if before is None or error == math.inf:
            return False
        low, high = sorted((before, n))
        rates = {**self._rates, n: self._measurement.rate}
        part = brings(low, rates[low], high, rates[high])
        one_more = brings(low, rates[low], high, rates[high] * (1 + error))
        return abs(part - SHARE) >= max(_FAR, _DOUBT * (one_more - part))

    def _finest(self, n: int) -> float:
        """The smallest part of the rate of a neighbor of n that the groups between them are to bring."""
        pairs = zip(self._numbers, self._numbers[1:])
        return min(((high - low) / low for low, high in pairs if n in (low, high)), default=1.0)

    def _judge(self, now: float, n: int, rate: float) -> Decision:
        """Decides what follows from the rate of the present number."""
        before, self._tried_from = self._tried_from, None
        self._rates[n], self._measurement = rate, _Measurement()
        why = f"{_speed(rate)} with {n}"
        if before is not None:
            low, high = sorted((before, n))
            part = brings(low, self._rates[low], high, self._rates[high])
            why = (
                f"{_speed(self._rates[low])} with {low}, {_speed(self._rates[high])} with {high}: "
                f"an added group brings {part:.0%} of its share"
            )
            self._precision = min(max(abs(part - SHARE) / 6, _MOST_PRECISION), _LEAST_PRECISION)
            if part < SHARE:
                self._refused[high] = now
                if n == high:
                    return self._set(low, high, f"{why}, less than {SHARE:.0%}")
            elif n == low:
                self._down = False
                return self._set(high, None, why)
        at = self._numbers.index(n)
        if self._down and at > 0:
            return self._set(self._numbers[at - 1], n, f"{why}; are fewer as fast?")
        self._down = False
        if at + 1 == len(self._numbers):
            self._rests_until = math.inf
        elif now - self._refused.get(self._numbers[at + 1], -math.inf) < AGAIN_SEC:
            self._rests_until = self._refused[self._numbers[at + 1]] + AGAIN_SEC
        else:
            return self._set(self._numbers[at + 1], n, why)
        return Decision(n, f"{_groups(n)} stay: {why}")

    def _give_up(self, now: float, since: float, n: int, groups: int) -> Decision | None:
        """Goes back from a larger number that cannot be kept, for example because memory is short."""
        before = self._tried_from
        if before is None or not self._trained or not before <= groups < n:
            return None
        self._interrupted += since
        if self._interrupted < _INTERRUPTED_SEC:
            return None
        self._refused[n], self._rests_until = now, now + AGAIN_SEC
        return self._set(before, None, f"{n} did not train for {self._interrupted:.0f} s of the attempt")

    def _set(self, n: int, tried_from: int | None, why: str) -> Decision:
        before, self._wanted, self._tried_from = self._wanted, n, tried_from
        self._measurement, self._trained, self._interrupted = _Measurement(), False, 0.0
        return Decision(n, f"{before} -> {_groups(n)}: {why}")


def _groups(n: int) -> str:
    return f"{n} group{'' if n == 1 else 's'}"


def _speed(rate: float) -> str:
    return f"{rate:.3g} steps/s" if rate >= 1 else f"{1 / rate:.3g} s/step"
