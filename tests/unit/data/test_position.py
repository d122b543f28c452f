from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any, Optional

import pytest

from torchft.data.position import (
    DataPlan,
    DataPosition,
    PlannedUnit,
    PositionDiffers,
    RankShare,
    SamplesDiffer,
)

PLAN = DataPlan(length=10, global_batch_size=4, micro_batch_size=2, shuffle=False, seed=0, epochs=2)


def positions(plan: DataPlan) -> list[DataPosition]:
    found = [DataPosition()]
    while found[-1] != plan.end:
        found.append(plan.advance(found[-1]))
    return found[:-1]


def counted(share: RankShare) -> list[list[int]]:
    return [list(unit.indices) for unit in share.units if unit.weight]


# Positions


@pytest.mark.parametrize(
    ("length", "global_batch_size", "batches", "last"),
    [(10, 4, 3, 2), (8, 4, 2, 4), (4, 4, 1, 4), (3, 4, 1, 3), (1, 4, 1, 1), (9, 1, 9, 1)],
)
def test_batches_of_an_epoch(length: int, global_batch_size: int, batches: int, last: int) -> None:
    plan = DataPlan(length, global_batch_size, micro_batch_size=1)
    assert plan.batches_per_epoch == batches
    sizes = [plan.batch_size(position) for position in positions(plan)]
    assert sizes == [global_batch_size] * (batches - 1) + [last]


def test_epochs_follow_each_other_and_end() -> None:
    assert positions(PLAN) == [DataPosition(epoch, batch) for epoch in (0, 1) for batch in (0, 1, 2)]
    assert positions(PLAN) == sorted(positions(PLAN))
    assert PLAN.end == DataPosition(2, 0)


def test_there_is_nothing_after_the_end() -> None:
    message = "there is no batch 0 in epoch 2: there are 2 epochs of 3 batches, from 0"
    with pytest.raises(PositionDiffers, match=message):
        PLAN.advance(PLAN.end)
    with pytest.raises(PositionDiffers, match=message):
        PLAN.share(PLAN.end, 0, 1)
    with pytest.raises(PositionDiffers, match=message):
        PLAN.share(PLAN.end, None, 1)


# Units and shares


def test_one_process_reads_the_epoch_in_units() -> None:
    assert [counted(PLAN.share(position, 0, 1)) for position in positions(PLAN)] == [
        [[0, 1], [2, 3]],
        [[4, 5], [6, 7]],
        [[8, 9]],
    ] * 2


def test_a_unit_has_a_weight_and_knows_whether_it_is_the_last() -> None:
    plan = replace(PLAN, length=7)  # the last batch has 3 samples, and weights for that size
    assert plan.share(DataPosition(1, 0), 0, 1).units == (
        PlannedUnit((0, 1), 0.5, False),
        PlannedUnit((2, 3), 0.5, True),
    )
    assert plan.share(DataPosition(1, 1), 0, 1).units == (
        PlannedUnit((4, 5), 2 / 3, False),
        PlannedUnit((6,), 1 / 3, True),
    )


COPY = "copy"


@pytest.mark.parametrize(
    ("units", "participants", "data_world_size", "expected"),
    [
        # participants; for each, its data ranks; for each, its units
        (5, 1, 1, [[[0, 1, 2, 3, 4]]]),
        (5, 2, 1, [[[0, 1]], [[2, 3, 4]]]),
        (5, 3, 1, [[[0]], [[1, 2]], [[3, 4]]]),
        (4, 2, 2, [[[0], [2]], [[1], [3]]]),
        (5, 1, 2, [[[0, 1, COPY], [2, 3, 4]]]),
        (5, 2, 2, [[[0], [2]], [[1, COPY], [3, 4]]]),
        (2, 3, 1, [[[COPY]], [[0]], [[1]]]),
        (1, 2, 2, [[[COPY], [COPY]], [[COPY], [0]]]),
        (3, 2, 2, [[[COPY], [1]], [[0], [2]]]),
    ],
)
def test_units_of_each_rank(units: int, participants: int, data_world_size: int, expected: list[Any]) -> None:
    plan = DataPlan(length=units, global_batch_size=units, micro_batch_size=1, shuffle=False)
    shares = [
        [
            plan.share(DataPosition(), rank, participants, data_rank, data_world_size)
            for data_rank in range(data_world_size)
        ]
        for rank in range(participants)
    ]
    found = [
        [[unit.indices[0] if unit.weight else COPY for unit in share.units] for share in of_group]
        for of_group in shares
    ]
    assert found == expected
    copies = [unit for of_group in shares for share in of_group for unit in share.units if not unit.weight]
    assert all(list(unit.indices) == [0] for unit in copies)


@pytest.mark.parametrize("shuffle", [False, True])
def test_any_cut_is_the_same_batch(shuffle: bool) -> None:
    """Each unit once; weights that sum to 1; parts that differ by at most one; a count that each
    data rank can check.
    """
    for length, micro, factor in itertools.product((1, 7, 12), (1, 3), (1, 2, 5)):
        plan = DataPlan(length, micro * factor, micro, shuffle, seed=5)
        for position, participants, data_world_size in itertools.product(
            positions(plan), range(1, 6), range(1, 4)
        ):
            expected = counted(plan.share(position, 0, 1))
            shares = [
                [
                    plan.share(position, rank, participants, data_rank, data_world_size)
                    for rank in range(participants)
                ]
                for data_rank in range(data_world_size)
            ]
            everywhere = [share for of_rank in shares for share in of_rank]
            assert [unit for share in everywhere for unit in counted(share)] == expected
            assert sum(unit.weight for share in everywhere for unit in share.units) == pytest.approx(1)
            parts = [len(counted(share)) for share in everywhere]
            assert max(parts) - min(parts) <= 1
            for of_rank in shares:
                for share in of_rank:
                    share.check(sum(share.samples for share in of_rank))
                    assert [unit.last for unit in share.units] == [False] * (len(share.units) - 1) + [True]
            for of_group in zip(*shares):
                assert len({len(share.units) for share in of_group}) == 1


def test_a_cut_by_speeds_is_the_same_batch() -> None:
    """Each unit once, a count that each data rank can check, and for equal speeds the usual parts."""
    plan = DataPlan(length=46, global_batch_size=18, micro_batch_size=1, seed=5)
    for position, data_world_size in itertools.product(positions(plan), range(1, 4)):
        for speeds in [(1, 1, 1), (3, 1, 2), (1, 9, 1), (100, 99, 100)]:
            of_ranks = [
                [
                    plan.share(position, rank, 3, data_rank, data_world_size, (), (), speeds)
                    for rank in range(3)
                ]
                for data_rank in range(data_world_size)
            ]
            everywhere = [share for of_rank in of_ranks for share in of_rank]
            assert [unit for share in everywhere for unit in counted(share)] == counted(
                plan.share(position, 0, 1)
            )
            assert sum(unit.weight for share in everywhere for unit in share.units) == pytest.approx(1)
            for data_rank, of_rank in enumerate(of_ranks):
                for rank, share in enumerate(of_rank):
                    share.check(sum(share.samples for share in of_rank))
                    if len(set(speeds)) == 1:
                        assert share == plan.share(position, rank, 3, data_rank, data_world_size)
            for of_group in zip(*of_ranks):
                assert len({len(share.units) for share in of_group}) == 1


def test_units_that_are_missing_are_cut_by_speeds_too() -> None:
    plan = DataPlan(length=12, global_batch_size=12, micro_batch_size=1, shuffle=False)
    parts = [plan.parts(DataPosition(), rank, 2, 1, range(3, 6), (200, 100)) for rank in range(2)]
    assert parts == [[[0, 1, 2, 6, 7, 8]], [[9, 10, 11]]]


@pytest.mark.parametrize("data_world_size", [1, 2])
def test_a_skipped_unit_is_in_no_share(data_world_size: int) -> None:
    plan = DataPlan(length=12, global_batch_size=12, micro_batch_size=2, shuffle=False)
    skipped = (0, 3)
    shares = [
        [
            plan.share(DataPosition(), rank, 4, data_rank, data_world_size, skipped=skipped)
            for rank in [*range(4), None]  # the last one heals
        ]
        for data_rank in range(data_world_size)
    ]
    everywhere = [share for of_rank in shares for share in of_rank]
    found = sorted(index for share in everywhere for unit in counted(share) for index in unit)
    assert found == [2, 3, 4, 5, 8, 9, 10, 11]
    # the weights of the others stay, and no copy is one of it
    assert {unit.weight for share in everywhere for unit in share.units} == {0, 2 / 12}
    assert all(list(u.indices) == [2, 3] for s in everywhere for u in s.units if not u.weight)
    for of_rank in shares:
        for share in of_rank:
            share.check(sum(share.samples for share in of_rank))


def test_a_batch_of_which_all_units_are_skipped() -> None:
    with pytest.raises(ValueError, match="all units of batch 2 of epoch 1 are skipped"):
        PLAN.share(DataPosition(1, 2), 0, 1, skipped=(0,))


@pytest.mark.parametrize("speeds", [(1,), (1, 2, 3), (1, 0), (-1, 1)])
def test_speeds_out_of_range(speeds: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"speeds are \(.*\): allowed are 2 numbers from 1, or none"):
        PLAN.parts(DataPosition(), 0, 2, speeds=speeds)


@pytest.mark.parametrize("data_rank", [0, 1])
def test_a_group_that_does_not_take_part_runs_one_unit_and_checks_like_the_others(data_rank: int) -> None:
    share = PLAN.share(DataPosition(0, 1), None, 2, data_rank, 2)
    assert share.units == (PlannedUnit((4, 5), 0.0, True),)
    assert (share.samples, share.expected) == (0, 2)


def test_each_epoch_has_its_own_order() -> None:
    plan = DataPlan(length=100, global_batch_size=100, micro_batch_size=100, epochs=2, seed=1)
    first, second = (plan.share(position, 0, 1).units[0].indices for position in positions(plan))
    other = replace(plan, seed=2).share(DataPosition(), 0, 1).units[0].indices
    assert sorted(first) == sorted(second) == sorted(other) == list(range(100))
    assert len({tuple(first), tuple(second), tuple(other), tuple(range(100))}) == 4


def test_no_memory_of_the_size_of_the_dataset_is_allocated() -> None:
    plan = DataPlan(length=2**62, global_batch_size=2**40, micro_batch_size=4, seed=3)
    share = plan.share(DataPosition(0, 2**21), 2**30 - 1, 2**30, 1, 2)
    assert len(share.units) == 2**7 and share.samples == 2**9 and share.expected == 2**39
    assert len({index for unit in share.units for index in unit.indices}) == 2**9


def test_a_reduction_of_more_or_fewer_samples_is_refused() -> None:
    share = PLAN.share(DataPosition(1, 2), 0, 2)
    share.check(2)
    for samples in (0, 1, 3):
        with pytest.raises(
            SamplesDiffer, match=f"batch 2 of epoch 1: {samples} samples were reduced, 2 belong to it"
        ):
            share.check(samples)


# Settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"length": 0}, "length is 0: allowed are whole numbers from 1 to"),
        ({"length": 2.5}, "length is 2.5: allowed are whole numbers"),
        ({"global_batch_size": 0}, "global_batch_size is 0: allowed are whole numbers from 1 to"),
        ({"micro_batch_size": 0}, "micro_batch_size is 0"),
        (
            {"micro_batch_size": 3},
            "global_batch_size is 4: allowed are multiples of micro_batch_size, which is 3",
        ),
        (
            {"micro_batch_size": 8},
            "global_batch_size is 4: allowed are multiples of micro_batch_size, which is 8",
        ),
        ({"epochs": 0}, "epochs is 0"),
        ({"epochs": None}, "epochs is None"),
        ({"seed": -1}, "seed is -1: allowed are whole numbers from 0 to"),
        ({"seed": 2**63}, rf"seed is {2**63}: allowed are whole numbers from 0 to 2\*\*63 - 1"),
        ({"seed": True}, "seed is True"),
        ({"shuffle": 1}, "shuffle is 1: allowed are True and False"),
    ],
)
def test_settings_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(PLAN, **settings)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ((0, 0), "num_participants is 0: allowed are whole numbers from 1 to"),
        ((2, 2), "participating_rank is 2: allowed are whole numbers from 0 to 1"),
        ((-1, 2), "participating_rank is -1"),
        ((0, 1, 0, 0), "data_world_size is 0"),
        ((0, 1, 2, 2), "data_rank is 2: allowed are whole numbers from 0 to 1"),
        ((None, 1, -1, 2), "data_rank is -1"),
    ],
)
def test_places_out_of_range(place: tuple[Optional[int], int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PLAN.share(DataPosition(), *place)


# State


def test_a_position_is_saved_and_loaded() -> None:
    for position in [*positions(PLAN), PLAN.end]:
        state = json.loads(json.dumps(PLAN.save(position)))
        assert PLAN.load(state) == position
    assert PLAN.save(DataPosition(1, 2)) == {
        "format": 1,
        "length": 10,
        "global_batch_size": 4,
        "micro_batch_size": 2,
        "shuffle": False,
        "seed": 0,
        "epochs": 2,
        "epoch": 1,
        "batch": 2,
    }


@pytest.mark.parametrize("change", [{"micro_batch_size": 1}, {"epochs": 5}])
def test_a_resumed_run_may_have_other_units_and_more_epochs(change: dict[str, Any]) -> None:
    assert replace(PLAN, **change).load(PLAN.save(PLAN.end)) == DataPosition(2, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"length": 11},
            "length is 10, and the saved position is of a run in which it was 11: samples would be left out",
        ),
        ({"global_batch_size": 8}, "global_batch_size is 4, .* it was 8: .* give global_batch_size=8"),
        ({"seed": 3}, "seed is 0, .* it was 3"),
        ({"shuffle": True}, "shuffle is False, .* it was True: .* give shuffle=True"),
        ({"epoch": 3}, "epochs is 2, and the saved position is in epoch 3, from 0"),
        ({"epoch": 2, "batch": 1}, "epochs is 2, and the saved position is in epoch 2, from 0"),
        ({"batch": 3}, "there is no batch 3 in epoch 0: there are 2 epochs of 3 batches"),
        ({"batch": -1}, "there is no batch -1 in epoch 0"),
        ({"epoch": -1}, "there is no batch 0 in epoch -1"),
        ({"format": 2}, "the saved position has format 2: this version reads 1"),
    ],
)
def test_a_position_of_another_run(change: dict[str, int], message: str) -> None:
    with pytest.raises(PositionDiffers, match=message):
        PLAN.load({**PLAN.save(DataPosition()), **change})


def test_a_state_of_something_else() -> None:
    with pytest.raises(
        PositionDiffers, match=r"the saved position has no format, length, .*batch: it was not saved by"
    ):
        PLAN.load({"step": 3})


# Digests


def test_each_field_changes_the_digest() -> None:
    digest = PLAN.digest(DataPosition(1, 2))
    assert digest == "a1717d3ae3c4e2f8"
    other = dict(length=11, global_batch_size=8, micro_batch_size=1, shuffle=True, seed=1, epochs=3)
    changed: list[Any] = [replace(PLAN, **{name: other[name]}) for name in PLAN.compared]
    others = {plan.digest(DataPosition(1, 2)) for plan in changed}
    others |= {PLAN.digest(place) for place in (DataPosition(0, 2), DataPosition(1, 1))}
    assert len(others | {digest}) == len(PLAN.compared) + 3
