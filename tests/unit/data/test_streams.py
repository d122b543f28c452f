"""The plan of a job that trains on a stream."""

from __future__ import annotations

from typing import Any, Optional

import pytest

from tests.bounded import often, todays
from tests.unit.data.streaming import Broken, Group, prove
from torchft.data.position import DataPosition, PositionDiffers, SamplesDiffer
from torchft.data.streams import Block, StreamPlan

PLAN = StreamPlan.of(16, 2, 3, 4)


@pytest.mark.parametrize(
    ("units", "shards", "sources"),
    [(16, None, 16), (16, 1, 1), (16, 10, 8), (16, 16, 16), (16, 100, 16), (12, 5, 4), (7, 6, 1), (1, 9, 1)],
)
def test_the_number_of_sources(units: int, shards: Optional[int], sources: int) -> None:
    plan = StreamPlan.of(3 * units, 3, 1, shards)
    assert (plan.sources, plan.blocks) == (sources, units // sources)


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
    assert PLAN.after(DataPosition(1, 7), parts) == after


@pytest.mark.parametrize(("samples", "more"), [(0, 0), (0, 2), (17, 1), (16, 5), (-1, 0)])
def test_sums_that_no_stream_gives(samples: int, more: int) -> None:
    with pytest.raises(SamplesDiffer, match=r"batch 7 of epoch 1: .* must give the same samples"):
        PLAN.after(DataPosition(1, 7), PLAN.count(samples, more))


def test_the_last_epoch_ends_the_job() -> None:
    assert PLAN.after(DataPosition(2, 7), PLAN.count(3, 0)) == PLAN.end == DataPosition(3, 0)


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
            "micro_batch_size is 2, .* in which it was 4: samples of a stream would be",
        ),
        ({"global_batch_size": 32}, "global_batch_size is 16, .* in which it was 32"),
        ({"sources": 8}, "sources is 4, .* in which it was 8"),
        ({"epoch": 4}, "epochs is 3, and the saved position is in epoch 4"),
        ({"batch": -1}, "there is no batch -1"),
        ({"format": 2}, "format 2: this version reads 1"),
        ({"sources": None}, "has no sources: it was not saved by a loader of a stream"),
    ],
)
def test_other_positions_are_refused(change: dict[str, Any], match: str) -> None:
    state = {**PLAN.save(DataPosition(1, 2)), **change}
    with pytest.raises(PositionDiffers, match=match):
        PLAN.load({name: value for name, value in state.items() if value is not None})


def test_digests_differ_where_samples_do() -> None:
    plans = [PLAN, StreamPlan.of(16, 2, 3, 8), StreamPlan.of(16, 4, 3, 4), StreamPlan.of(16, 2, 4, 4)]
    places = [DataPosition(0, 0), DataPosition(0, 1), DataPosition(1, 0)]
    assert len({plan.stamp(place).digest for plan in plans for place in places}) == 12


# Histories


def test_random_histories() -> None:
    steps = sum(len(prove(seed)) for seed in range(often(1000)))
    assert steps > 0


@pytest.mark.slow  # a minute; test_random_histories has 200, or 1000 if SEED is set
@pytest.mark.parametrize("part", range(4))
def test_many_histories(part: int) -> None:
    first = todays(10_000 * part)
    for seed in range(first, first + 5_000):
        prove(seed)


class AdvancesByOne(Group):
    """A mistake: nobody finds the end of an epoch."""

    def committed(self, counted: int) -> None:
        self.position = self.plan.advance(self.position)


class EndsAtAShortBatch(Group):
    """A mistake: an epoch ends with the first batch that lacks samples."""

    def committed(self, counted: int) -> None:
        short = counted % (1 << 40) < self.plan.global_batch_size
        super().committed(counted % (1 << 40) if short else counted)


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


@pytest.mark.parametrize("mistake", [AdvancesByOne, EndsAtAShortBatch, KeepsTheEpoch])
def test_mistakes_are_found(mistake: type[Group]) -> None:
    with pytest.raises((Broken, SamplesDiffer)):
        sum(len(prove(seed, mistake)) for seed in range(200))


def test_a_reader_that_has_kept_nothing_opens_again() -> None:
    for seed in range(20):
        assert prove(seed, ReadsOn)
