"""The plan of a job that trains on a stream."""

from __future__ import annotations

from collections import Counter
from typing import Any, Optional

import pytest

from tests.bounded import often, todays
from tests.unit.data.streaming import Broken, Group, prove
from torchft.data.position import DataPosition, PositionDiffers, SamplesDiffer
from torchft.data.streams import Block, StreamPlan

PLAN = StreamPlan.of(16, 2, 3, 4)


@pytest.mark.parametrize(
    ("units", "shards", "sources", "turns"),
    [
        (16, None, 64, 4),
        (16, 1, 1, 1),
        (16, 10, 8, 1),
        (16, 16, 16, 1),
        (16, 40, 32, 2),
        (16, 100, 64, 4),
        (12, 5, 4, 1),
        (7, 6, 4, 4),
        (1, 9, 4, 4),
    ],
)
def test_the_number_of_sources(units: int, shards: Optional[int], sources: int, turns: int) -> None:
    plan = StreamPlan.of(3 * units, 3, 1, shards)
    assert (plan.sources, plan.turns) == (sources, turns)
    of_turns = [
        {plan.block(DataPosition(0, batch), unit).source for unit in range(units)} for batch in range(turns)
    ]
    assert sorted(source for of_turn in of_turns for source in of_turn) == list(range(sources))


def test_batches_take_turns() -> None:
    plan = StreamPlan.of(8, 2, 1, 8)  # four units, two turns of four sources
    found = [[plan.block(DataPosition(0, batch), unit)[:2] for unit in range(4)] for batch in range(4)]
    even, odd = (0, 2, 4, 6), (1, 3, 5, 7)
    assert found == [
        [(source, number) for source in sources]
        for sources, number in ((even, 0), (odd, 0), (even, 1), (odd, 1))
    ]


def test_a_turn_that_has_ended_is_left_out() -> None:
    plan = StreamPlan.of(8, 2, 2, 8)
    at, ended = DataPosition(0, 4), 0
    seen = []
    for more in (4, 0, 2, 1, 0, 3):  # sources that have more
        seen.append((at.epoch, at.batch))
        at, ended = plan.after(at, ended, plan.count(8, more))
    assert seen == [(0, 4), (0, 5), (0, 6), (0, 8), (0, 10), (1, 0)]
    assert (at, ended) == (DataPosition(1, 1), 0)


def test_a_turn_may_be_empty() -> None:
    """In its first batch only: later ones are left out."""
    plan = StreamPlan.of(8, 2, 2, 8)
    assert plan.after(DataPosition(0, 1), 0, 0) == (DataPosition(0, 2), 0b10)
    with pytest.raises(SamplesDiffer):
        plan.after(DataPosition(0, 3), 0, 0)


def test_each_batch_continues_each_source() -> None:
    for batch in range(3):
        blocks = [PLAN.block(DataPosition(1, batch), unit) for unit in range(8)]
        expected = [(source, 2 * batch + slot) for source in range(4) for slot in range(2)]
        assert [block[:2] for block in blocks] == expected
        assert [block.last for block in blocks] == 4 * [False, True]
    assert PLAN.block(DataPosition(0, 5), 7) == Block(3, 11, True)


def test_an_unchanged_membership_reads_the_same_sources() -> None:
    for groups in (1, 2, 4):
        for rank in range(groups):
            of_steps = {
                tuple(
                    PLAN.block(position, unit.number).source
                    for unit in PLAN.share(position, rank, groups).units
                )
                for position in (DataPosition(0, 0), DataPosition(0, 9), DataPosition(2, 1))
            }
            assert len(of_steps) == 1


@pytest.mark.parametrize(
    ("samples", "more", "after"),
    [
        (16, 4, DataPosition(1, 8)),
        (1, 1, DataPosition(1, 8)),
        (16, 0, DataPosition(2, 0)),
        (3, 0, DataPosition(2, 0)),
    ],
)
def test_the_position_after_a_step(samples: int, more: int, after: DataPosition) -> None:
    parts = PLAN.count(samples - 1, more) + PLAN.count(1, 0)  # of two groups
    assert PLAN.after(DataPosition(1, 7), 0, parts) == (after, 0)


@pytest.mark.parametrize(("samples", "more"), [(0, 0), (0, 2), (17, 1), (16, 5), (-1, 0)])
def test_sums_that_no_stream_gives(samples: int, more: int) -> None:
    with pytest.raises(SamplesDiffer, match=r"batch 7 of epoch 1: .* must give the same samples"):
        PLAN.after(DataPosition(1, 7), 0, PLAN.count(samples, more))


def test_the_last_epoch_ends_the_job() -> None:
    assert PLAN.after(DataPosition(2, 7), 0, PLAN.count(3, 0)) == (DataPosition(3, 0), 0)
    assert PLAN.end == DataPosition(3, 0)


def test_a_position_is_saved_and_loaded() -> None:
    saved = PLAN.save(DataPosition(1, 10**7))
    assert PLAN.load(saved) == DataPosition(1, 10**7)
    longer = StreamPlan.of(16, 2, 9, 5)  # five files give four sources, too
    assert longer.load(saved) == DataPosition(1, 10**7)
    assert PLAN.load(PLAN.save(PLAN.end)) == PLAN.end


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            {"micro_batch_size": 4},
            "micro_batch_size is 2, .* in which it was 4: samples would be left out",
        ),
        ({"global_batch_size": 32}, "global_batch_size is 16, .* in which it was 32"),
        ({"sources": 8}, "sources is 4, .* in which it was 8"),
        ({"epoch": 4}, "epochs is 3, and the saved position is in epoch 4"),
        ({"batch": -1}, "there is no batch -1"),
        ({"format": 2}, "format 2: this version reads 1"),
        ({"sources": None}, "has no sources: it was not saved by a loader of this kind"),
    ],
)
def test_other_positions_are_refused(change: dict[str, Any], match: str) -> None:
    state = {**PLAN.save(DataPosition(1, 2)), **change}
    with pytest.raises(PositionDiffers, match=match):
        PLAN.load({name: value for name, value in state.items() if value is not None})


def test_digests_differ_where_samples_do() -> None:
    plans = [PLAN, StreamPlan.of(16, 2, 3, 8), StreamPlan.of(16, 4, 3, 4), StreamPlan.of(16, 2, 4, 4)]
    places = [DataPosition(0, 0), DataPosition(0, 1), DataPosition(1, 0)]
    assert len({plan.digest(place) for plan in plans for place in places}) == 12


# Histories


def test_random_histories() -> None:
    log: Counter[str] = Counter()
    for seed in range(often(500)):
        log += prove(seed)[0].log
    assert log["by state"] and log["skipped"] and log["read"]


@pytest.mark.slow(minutes=10)  # test_random_histories has 100, or 500 if SEED is set
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(20))
def test_a_hundred_thousand_histories(part: int) -> None:
    first = todays(5_000 * part)
    for seed in range(first, first + 5_000):
        prove(seed)


class AdvancesByOne(Group):
    """A mistake: nobody finds the end of an epoch."""

    def committed(self, counted: int) -> None:
        self.position = self.plan.advance(self.position)


class ForgetsTheTurns(Group):
    """A mistake: a group that heals does not get the turns that have ended."""

    def committed(self, counted: int) -> None:
        super().committed(counted)
        self.ended &= 1


class EndsAtAShortBatch(Group):
    """A mistake: an epoch ends with the first batch that lacks samples."""

    def committed(self, counted: int) -> None:
        short = counted % (1 << 40) < self.plan.global_batch_size
        super().committed(counted % (1 << 40) if short else counted)


class TakesTheNewestState(Group):
    """A mistake: the state of a source after a lost step is taken for one of before it."""

    def took(self, read: Any) -> None:
        if read.saved is not None:
            self.newest = getattr(self, "newest", {}) | {read.saved.source: read.saved}

    def save(self) -> Any:
        return [saved[1:] for saved in getattr(self, "newest", {}).values()]

    def heal(self, position: DataPosition, ended: int, states: Any) -> None:
        super().heal(position, ended, [(source, 0, state) for source, _, state in states])


class ReadsOn(Group):
    """A mistake: a reader gives the next block of its source, whichever it is asked for."""

    def read(self, position: DataPosition, unit: int) -> Any:
        for reader in self.readers:
            for source in reader._sources.values():
                source._kept.clear()
        return super().read(position, unit)


class KeepsTheEpoch(Group):
    """A mistake: what was open in the last epoch is read on in the next one."""

    def read(self, position: DataPosition, unit: int) -> Any:
        for reader in self.readers:
            reader._epoch = position.epoch
        return super().read(position, unit)


@pytest.mark.parametrize(
    "mistake",
    [
        *(AdvancesByOne, ForgetsTheTurns, EndsAtAShortBatch, TakesTheNewestState),
        pytest.param(KeepsTheEpoch, marks=pytest.mark.slow),  # found after some seconds
    ],
)
def test_mistakes_are_found(mistake: type[Group]) -> None:
    with pytest.raises((Broken, SamplesDiffer)):
        sum(len(prove(seed, mistake)[1]) for seed in range(200))


def test_a_reader_that_has_kept_nothing_opens_again() -> None:
    for seed in range(often(40)):
        assert prove(seed, ReadsOn)[1]
