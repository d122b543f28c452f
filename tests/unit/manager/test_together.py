"""The messages between the ranks of a group during a heal. Random histories of such heals are in test_along.py."""

from __future__ import annotations

import pytest

from torchft._manager.together import Progress, Ranks


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
    ranks = [Ranks(store, "group:uuid", number, 2) for number in range(2)]
    assert Ranks(store, "alone:uuid", 0, 1).group_progress(7) is Progress.READY and not store
    ranks[0].report(7, Progress.READY)
    ranks[0].report(7, Progress.READY)  # in a second attempt
    assert [rank.group_progress(8) for rank in ranks] == [Progress.ARRIVING] * 2
    ranks[1].report(7, Progress.READY)
    assert [rank.group_progress(8) for rank in ranks] == [Progress.READY] * 2
    assert [rank.group_progress(9) for rank in ranks] == [Progress.ARRIVING] * 2, "a report counts for one step"
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
    """The second attempt at a step repeats the report. The store may already have it, if only its answer was lost."""

    class Unreliable(Store):
        calls = 0

        def set(self, key: str, value: str) -> None:
            self.calls += 1
            if self.calls > 1 or arrives:
                super().set(key, value)
            if self.calls == 1:
                raise ConnectionError("the store did not answer")

    store = Unreliable()
    ranks = [Ranks(store, "group:uuid", number, 2) for number in range(2)]
    with pytest.raises(ConnectionError):
        ranks[0].report(7, Progress.READY)
    ranks[0].report(7, Progress.READY)
    assert [rank.group_progress(8) for rank in ranks] == [Progress.ARRIVING] * 2
    ranks[1].report(7, Progress.READY)
    assert [rank.group_progress(8) for rank in ranks] == [Progress.READY] * 2
