from __future__ import annotations

import json
from typing import Any, Optional

import pytest

from torchft._manager.quorum.plan import HealSource, Plan, WorldSizeMode, make_plan
from torchft._torchft import QuorumResult


def result(**fields: Any) -> QuorumResult:
    """Makes a quorum result for group 1 of 3. The other two groups are up to date, and group 1 heals from
    group 0.
    """
    values: dict[str, Any] = dict(
        quorum_id=7,
        replica_rank=1,
        replica_world_size=3,
        recover_src_manager_address="http://source:1",
        recover_src_replica_rank=0,
        store_address="store:1",
        max_step=20,
        max_replica_rank=None,
        max_world_size=2,
        heal=True,
        replica_ids=["a", "b", "c"],
        reconfigure_handles=["ha", "hb", "hc"],
        committed_quorum_id=6,
        additional_source_addresses=["http://additional:1"],
    )
    return QuorumResult(**{**values, **fields})


def plan(quorum: Any, **settings: Any) -> Plan:
    defaults = dict(
        use_async_quorum=True, allow_heal=True, world_size_mode=WorldSizeMode.DYNAMIC, min_replica_size=1
    )
    return make_plan(quorum, **{**defaults, **settings})


@pytest.mark.parametrize(
    ("use_async", "allow_heal", "rank", "participants"),
    [
        (True, True, None, 2),  # heals in the background, and does not participate in this step
        (False, True, 1, 3),  # has healed before the step begins
        (True, False, None, 2),
        (False, False, None, 2),  # cannot heal: its gradients do not belong to this step
    ],
)
def test_participants(use_async: bool, allow_heal: bool, rank: Optional[int], participants: int) -> None:
    got = plan(result(), use_async_quorum=use_async, allow_heal=allow_heal)
    assert (got.participating_rank, got.participants) == (rank, participants)
    assert got.num_up_to_date == 2  # the same in all groups: decisions that all must agree on depend on it
    assert got.heal is allow_heal


@pytest.mark.parametrize(
    ("handles", "of_quorum", "least", "participants"),
    [
        ("ppp", {}, 1, 2),
        ("pao", {}, 1, 3),  # a group heals at once
        ("", {}, 1, 3),
        ("ppp", {"max_step": 0}, 1, 3),  # all groups but one heal at once
        ("paa", {}, 2, 2),
        ("ppp", {}, 3, 3),  # without the group too few take part
        ("ppp", {"max_world_size": 1}, 1, 1),
        ("ppa", {"max_world_size": 1}, 1, 3),  # "auto" heals at once from the only group with the state
    ],
)
def test_participants_of_a_synchronous_quorum_with_heals_in_passing(
    handles: str, of_quorum: dict[str, Any], least: int, participants: int
) -> None:
    """A group that heals may train along, with weight 0, unless the others count on it."""
    modes = {"p": "in_passing", "a": "auto", "o": ""}
    texts = [json.dumps({"id": "x", "torchft_in_passing": modes[handle]}) for handle in handles]
    got = plan(result(reconfigure_handles=texts, **of_quorum), use_async_quorum=False, min_replica_size=least)
    rank = 1 if participants == 3 else None
    assert (got.participating_rank, got.participants, got.in_background) == (rank, participants, False)


@pytest.mark.parametrize(
    ("max_rank", "expected"),
    [(0, 0), (1, 1), (2, None), (3, None)],
)
def test_spares_do_not_take_part(max_rank: int, expected: Optional[int]) -> None:
    got = plan(
        result(max_replica_rank=max_rank, max_world_size=4, heal=False),
        world_size_mode=WorldSizeMode.FIXED_WITH_SPARES,
        min_replica_size=2,
    )
    assert (got.participating_rank, got.participants) == (expected, 2)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"use_async_quorum": False}, (100, 50, 200)),
        ({}, (100, 200)),  # only the groups at max_step take part
        ({"world_size_mode": WorldSizeMode.FIXED_WITH_SPARES}, (100,)),
    ],
)
def test_the_speeds_are_those_of_the_participants(
    settings: dict[str, Any], expected: tuple[int, ...]
) -> None:
    got = plan(result(speeds=[100, 50, 200], max_speeds=[100, 200]), **settings)
    assert got.speeds == expected
    assert plan(result(), **settings).speeds == ()


def test_the_units_that_all_groups_leave_out() -> None:
    assert plan(result(skipped=["0.4.1"])).skipped == ("0.4.1",)


def test_spares_do_not_replace_missing_groups() -> None:
    got = plan(
        result(max_replica_rank=0, max_world_size=1),
        world_size_mode=WorldSizeMode.FIXED_WITH_SPARES,
        min_replica_size=2,
    )
    assert got.participants == 1


def test_sources_and_destinations() -> None:
    assert plan(result()).source == HealSource(0, "http://source:1", "a")
    assert plan(result(replica_ids=[])).source == HealSource(0, "http://source:1", "")
    assert plan(result()).additional_sources == ["http://additional:1"]
    assert plan(result(heal=False)).source is None
    assert plan(result(), allow_heal=False).additional_sources == []
    assert plan(result(heal=False, help_dst_replica_ranks=[2])).help_dst == [2]
    assert plan(result(heal=False, help_dst_replica_ranks=[2]), allow_heal=False).help_dst == []
    assert plan(result(heal=False, recover_dst_replica_ranks=[2])).recover_dst == [2]
    assert plan(result(heal=False, recover_dst_replica_ranks=[2]), allow_heal=False).recover_dst == []


def test_with_init_sync_all_groups_count() -> None:
    # At step 0 all groups are at max_step; those that heal contribute zeros and still count.
    got = plan(result(max_step=0, max_replica_rank=1, max_world_size=3))
    assert (got.participating_rank, got.participants, got.heal) == (1, 3, True)


@pytest.mark.parametrize(
    ("handles", "participants", "expected"),
    [
        ("aaa", 3, True),
        ("aaa", 2, False),  # a group heals: it contributes zeros, and the backend would count it
        ("aab", 3, False),
        ("", 3, False),
    ],
)
def test_the_backend_averages(handles: str, participants: int, expected: bool) -> None:
    text = {"a": '{"id": "a", "torchft_averages": "1"}', "b": '{"id": "b"}'}
    quorum = result(
        max_world_size=participants, heal=False, reconfigure_handles=[text[handle] for handle in handles]
    )
    assert plan(quorum).averages is expected


@pytest.mark.parametrize(
    ("handles", "source", "expected"),
    [
        ("ap", 1, True),
        ("ap", 0, False),
        ("bp", 0, True),  # not known: a process group of the user's
        ("", 0, True),
    ],
)
def test_the_source_gives_parts(handles: str, source: int, expected: bool) -> None:
    ours, parts = '"torchft_heals": "1"', '"torchft_in_passing": "auto"'
    text = {"a": f'{{"id": "a", {ours}}}', "b": "{}", "p": f'{{"id": "p", {ours}, {parts}}}'}
    quorum = result(reconfigure_handles=[text[handle] for handle in handles], recover_src_replica_rank=source)
    assert plan(quorum).gives_parts is expected


@pytest.mark.parametrize(
    ("handles", "fields", "expected"),
    [
        ("aaa", {}, True),
        ("nnn", {}, True),
        ("aab", {}, False),  # an upstream group
        ("", {}, False),
        ("aaa", {"max_world_size": 3, "max_replica_rank": 1, "heal": False}, False),
        # Init_sync.
        ("aaa", {"max_world_size": 3, "max_replica_rank": 1, "heal": False, "max_step": 0}, True),
        ("a", {"replica_world_size": 1, "max_world_size": 1, "max_step": 0}, False),
        # one loads a copy
        ("ara", {"max_world_size": 3, "max_replica_rank": 0, "heal": False}, True),
        ("aar", {"max_world_size": 3, "max_replica_rank": 0, "heal": False}, True),
        ("arb", {"max_world_size": 3, "max_replica_rank": 0, "heal": False}, False),
        ("r", {"replica_world_size": 1, "max_world_size": 1, "max_replica_rank": 0, "heal": False}, False),
    ],
)
def test_groups_wait_for_those_that_heal_or_load_a_copy(
    handles: str, fields: dict[str, Any], expected: bool
) -> None:
    text = {
        "a": '{"id": "a", "torchft_heals": "1"}',
        "b": '{"id": "b"}',
        "n": 'native torchft_{"torchft_heals": "1"}',
        "r": '{"id": "r", "torchft_heals": "1", "torchft_restores": "1"}',
    }
    quorum = result(reconfigure_handles=[text[handle] for handle in handles], **fields)
    assert plan(quorum).awaits_heals is expected


@pytest.mark.parametrize(("told", "steps"), [(["2", "16", "8"], 16), (["", "2", ""], 2), (["", "", "x"], 0)])
def test_the_steps_between_two_copies_are_the_most_that_a_group_needs(told: list[str], steps: int) -> None:
    handles = [json.dumps({"id": "x", "torchft_snapshots": text}) for text in told]
    assert plan(result(reconfigure_handles=handles)).snapshot_steps == steps
    assert plan(result()).snapshot_steps == 0
