"""The messages between the ranks of a group during a heal. Random histories of such heals are in
test_in_passing_rules.py.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from tests.unit.waiting import wait_until
from torchft._manager.heal.together import Agreement, GroupRanks, HealingRanks, Progress

LONG, NONE = timedelta(seconds=60), timedelta(0)


class Store(dict[str, str]):
    """The store of a group, in memory."""

    def set(self, key: str, value: str) -> None:
        self[key] = value

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def delete_key(self, key: str) -> bool:
        return self.pop(key, None) is not None


def test_progress_is_what_all_ranks_of_a_group_have_reported() -> None:
    store = Store()
    ranks = [HealingRanks(GroupRanks(store, "group:uuid", number, 2)) for number in range(2)]
    assert (
        HealingRanks(GroupRanks(store, "alone:uuid", 0, 1)).group_progress(7) is Progress.READY and not store
    )
    ranks[0].report(7, Progress.READY)
    ranks[0].report(7, Progress.READY)  # in a second attempt
    assert [rank.group_progress(8) for rank in ranks] == [Progress.ARRIVING] * 2
    ranks[1].report(7, Progress.READY)
    assert [rank.group_progress(8) for rank in ranks] == [Progress.READY] * 2
    assert [rank.group_progress(9) for rank in ranks] == [Progress.ARRIVING] * 2, (
        "a report counts for one step"
    )
    ranks[1].report(9, Progress.WHOLE)
    assert (
        [rank.group_progress(10) for rank in ranks]
        == [rank.group_progress(9) for rank in ranks]
        == [Progress.WHOLE] * 2
    )
    for step in range(10, 100):
        for rank in ranks:
            rank.report(step, Progress.READY)
            rank.group_progress(step)
    assert len(store) < 20, "keys of earlier steps are deleted"


@pytest.mark.parametrize("arrives", [False, True])
def test_a_report_that_the_store_did_not_acknowledge_is_repeated_and_counts_once(arrives: bool) -> None:
    """The second attempt at a step repeats the report. The store may already have it, if only its answer was
    lost.
    """

    class Unreliable(Store):
        calls = 0

        def set(self, key: str, value: str) -> None:
            self.calls += 1
            if self.calls > 1 or arrives:
                super().set(key, value)
            if self.calls == 1:
                raise ConnectionError("the store did not answer")

    store = Unreliable()
    ranks = [HealingRanks(GroupRanks(store, "group:uuid", number, 2)) for number in range(2)]
    with pytest.raises(ConnectionError):
        ranks[0].report(7, Progress.READY)
    ranks[0].report(7, Progress.READY)
    assert [rank.group_progress(8) for rank in ranks] == [Progress.ARRIVING] * 2
    ranks[1].report(7, Progress.READY)
    assert [rank.group_progress(8) for rank in ranks] == [Progress.READY] * 2


def make_agreements(store: HashStore, quorum_id: int = 1) -> list[Agreement]:
    agreements = [Agreement(GroupRanks(store, "group:uuid", number, 2)) for number in range(2)]
    for agreement in agreements:
        agreement.begin(quorum_id, 7)
    return agreements


def test_a_rank_loads_its_state_once_all_ranks_of_the_group_have_theirs() -> None:
    store = HashStore()
    first, second = make_agreements(store)
    with ThreadPoolExecutor() as threads:
        loads = threads.submit(first.reached, LONG)
        wait_until(lambda: store.num_keys() > 0)
        assert not loads.done()
        assert second.reached(NONE)
        assert loads.result(60)
    assert not first.refuse(), "an error comes too late"
    for agreement in (first, second):
        agreement.begin(2, 9)
    assert store.num_keys() == 0, "keys of earlier heals are deleted"


def test_no_rank_loads_its_state_if_one_has_none() -> None:
    first, second = make_agreements(HashStore())
    with ThreadPoolExecutor() as threads:
        loads = threads.submit(first.reached, LONG)
        assert second.refuse()
        assert not loads.result(60)
    assert not second.reached(LONG), "it arrives after all"


def test_a_heal_that_begins_again_in_its_step_is_another_one() -> None:
    """With two optimizers a group asks for the quorum of a step twice, and discards the state of the first
    time.
    """
    store = HashStore()
    first, second = make_agreements(store)
    assert first.refuse()
    first.begin(1, 7)
    assert second.refuse()
    second.begin(1, 7)
    with ThreadPoolExecutor() as threads:
        loads = threads.submit(first.reached, LONG)
        assert second.reached(LONG)
        assert loads.result(60)


def test_a_rank_that_does_not_answer_is_not_waited_for_after_the_timeout() -> None:
    first, second = make_agreements(HashStore())
    assert not first.reached(NONE)
    assert not second.reached(LONG)


@pytest.mark.parametrize(("members", "step"), [(1, 7), (2, 0)])
def test_a_single_rank_and_one_at_step_0_wait_for_no_other(members: int, step: int) -> None:
    """Each rank has a source of its own at step 0, in another group or in its own."""
    store = HashStore()
    agreement = Agreement(GroupRanks(store, "group:uuid", 0, members))
    agreement.begin(1, step)
    assert agreement.reached(NONE) and agreement.refuse() and store.num_keys() == 0
