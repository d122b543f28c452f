"""The initialized flag: a table, and random histories compared with a rule that uses the complete history."""

from __future__ import annotations

import random

import pytest

from tests.bounded import often, todays
from torchft.ftlib.flag import Flag, FlagEvent

REBUILDING, REBUILT, BEGUN, ENDED = FlagEvent.REBUILDING, FlagEvent.REBUILT, FlagEvent.BEGUN, FlagEvent.ENDED
FAILED, JOINED, MEMBER_FAILED = FlagEvent.FAILED, FlagEvent.JOINED, FlagEvent.MEMBER_FAILED
UP = (REBUILDING, REBUILT)


@pytest.mark.parametrize(
    ("events", "initialized"),
    [
        ((), False),
        ((REBUILDING,), False),
        (UP, True),
        ((*UP, BEGUN), True),
        ((*UP, BEGUN, ENDED), True),
        ((*UP, BEGUN, FAILED), False),
        ((*UP, JOINED), False),
        ((*UP, MEMBER_FAILED), False),
        ((*UP, BEGUN, JOINED), True),  # takes effect after the collective
        ((*UP, BEGUN, JOINED, ENDED), False),
        ((*UP, BEGUN, MEMBER_FAILED), False),  # takes effect at once
        ((*UP, BEGUN, MEMBER_FAILED, ENDED), False),
        ((REBUILDING, JOINED, REBUILT), False),  # the list of members may be older than the join
        ((REBUILDING, MEMBER_FAILED, REBUILT), False),
        ((REBUILDING, FAILED), False),
        ((JOINED, *UP), True),
        ((*UP, BEGUN, FAILED, *UP), True),
    ],
)
def test_flag(events: tuple[FlagEvent, ...], initialized: bool) -> None:
    assert after(events).initialized is initialized


def after(events: tuple[FlagEvent, ...] | list[FlagEvent]) -> Flag:
    flag = Flag()
    for event in events:
        flag = flag.after(event)
    return flag


def oracle(events: list[FlagEvent]) -> bool:
    """Initialized: the last rebuild succeeded, and no reason to do another one has taken effect since it
    began.
    """
    starts = [i for i, event in enumerate(events) if event is REBUILDING]
    if not starts:
        return False
    since = events[starts[-1] + 1 :]
    if REBUILT not in since or FAILED in since or MEMBER_FAILED in since:
        return False
    in_collective = False
    waits = False  # a join that takes effect at the end of the collective
    for i, event in enumerate(since):
        if event is BEGUN:
            in_collective = True
        elif event is ENDED:
            in_collective = False
            if waits:
                return False
        elif event is JOINED:
            if not in_collective or REBUILT not in since[:i]:
                return False
            waits = True
    return True


def test_random_histories() -> None:
    rng = random.Random(todays(23))
    for _ in range(often(100_000)):
        events: list[FlagEvent] = []
        doing = None
        for _ in range(rng.randrange(1, 14)):
            allowed = [JOINED, MEMBER_FAILED]
            allowed += {None: [REBUILDING, BEGUN], REBUILDING: [REBUILT, FAILED], BEGUN: [ENDED, FAILED]}[
                doing
            ] * 3
            event = rng.choice(allowed)
            if event in (REBUILDING, BEGUN):
                doing = event
            elif event not in (JOINED, MEMBER_FAILED):
                doing = None
            events.append(event)
        assert after(events).initialized is oracle(events), events
