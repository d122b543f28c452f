"""The messages among the ranks of a group about a heal; random histories of such heals are in test_along.py."""

from __future__ import annotations

from collections import Counter

from torchft._manager.together import Progress, Ranks


class Store(Counter[str]):
    """Of a group."""

    def add(self, key: str, amount: int) -> int:
        self[key] += amount
        return self[key]

    def delete_key(self, key: str) -> bool:
        return self.pop(key, None) is not None


def test_what_the_ranks_of_a_group_have_heard() -> None:
    store = Store()
    ranks = [Ranks(store, "group:uuid", number, 2) for number in range(2)]
    assert Ranks(store, "alone:uuid", 0, 1).heard(7) is Progress.READY and not store
    ranks[0].say(7, Progress.READY)
    ranks[0].say(7, Progress.READY)  # in a second attempt
    assert [rank.heard(8) for rank in ranks] == [Progress.ARRIVING] * 2
    ranks[1].say(7, Progress.READY)
    assert [rank.heard(8) for rank in ranks] == [Progress.READY] * 2
    assert [rank.heard(9) for rank in ranks] == [Progress.ARRIVING] * 2, "what was said is of one step"
    ranks[1].say(9, Progress.WHOLE)
    assert [rank.heard(10) for rank in ranks] == [rank.heard(9) for rank in ranks] == [Progress.WHOLE] * 2
    for step in range(10, 100):
        for rank in ranks:
            rank.say(step, Progress.READY)
            rank.heard(step)
    assert len(store) < 20, "of earlier steps nothing is kept"
