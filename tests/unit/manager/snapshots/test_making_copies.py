"""Copies hold the state with which a step began, and end before the weights change."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from tests.unit.manager.snapshots.one_rank import Rank
from torchft._manager.rank import Position
from torchft._manager.snapshots.rate import Rate
from torchft.checkpointing.snapshots import reading, remote, slots
from torchft.checkpointing.snapshots.due import Due, Status, write_status
from torchft.checkpointing.snapshots.reading import Source
from torchft.checkpointing.snapshots.remote import Held


def saved(rank: int = 0) -> list[int]:
    found = slots.found(slots.job_name(), "group", rank, lambda text: None)
    return [header.step for _, header in found]


class OtherHost:
    """A host with copies of slots, as they are when this is made."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path, of: int, ranks: int = 1) -> None:
        self.read: list[int] = []  # the ranks whose regions were read
        held = []
        for rank in range(ranks):
            for path, header in slots.found(slots.job_name(), "group", rank, lambda text: None):
                if header.step == of:
                    source = reading.local(Path(shutil.copy(path, folder / f"{rank}")))
                    held.append(Held(header, Source("http://h", partial(self._opened, source, rank))))
        patch.setattr(remote, "held", lambda lighthouse, job, say: held)

    def _opened(self, source: Source, rank: int, offset: int, length: int) -> Any:
        if offset == slots.PAGE:
            self.read.append(rank)
        return source.open(offset, length)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Callable[[], threading.Event]:
    """Holds the writer of the next copy until the event is set."""

    def hold() -> threading.Event:
        released, real = threading.Event(), slots._written

        def written(*args: Any) -> Any:
            assert released.wait(30)
            yield from real(*args)

        monkeypatch.setattr(slots, "_written", written)
        return released

    return hold


def test_each_committed_step_is_copied_once_and_the_newest_is_restored() -> None:
    rank = Rank({"w": torch.zeros(3), "step": 0})
    assert rank.restore() == 0
    rank.begin(0)  # nothing is committed yet: the state is that of each start
    for step in range(1, 5):
        rank.state = {"w": torch.full((3,), float(step)), "step": step}
        rank.step(step)
        rank.step(step)  # the step comes again
    assert saved() == [4, 3]
    rank.snapshots.close(finished=False)
    again = Rank({"w": torch.zeros(3), "step": 0}, life=1)
    assert again.restore() == 4
    assert again.snapshots.restored
    assert again.loaded["step"] == 4 and torch.equal(again.loaded["w"], torch.full((3,), 4.0))
    again.step(4)
    assert saved() == [4, 3], "it is there already"
    assert not again.snapshots.restored
    again.snapshots.close(finished=True)
    assert saved() == []


def test_a_damaged_copy_is_replaced_by_that_of_another_host(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rank = Rank({"w": torch.zeros(3), "step": 0})
    assert rank.restore() == 0
    for step in (4, 5):
        rank.state = {"w": torch.full((3,), float(step)), "step": step}
        rank.step(step)
    rank.snapshots.close(finished=False)
    other = OtherHost(monkeypatch, tmp_path, of=5)
    damaged = next(
        path for path, header in slots.found(slots.job_name(), "group", 0, print) if header.step == 5
    )
    content = bytearray(damaged.read_bytes())
    content[slots.PAGE + 1] ^= 1
    damaged.write_bytes(content)
    again = Rank({"w": torch.zeros(3), "step": 0}, life=1, lighthouse="http://h:2")
    assert again.restore() == 5
    assert other.read == [0] and torch.equal(again.loaded["w"], torch.full((3,), 5.0))
    again.snapshots.close(finished=True)


def test_a_step_that_one_rank_lacks_is_not_newer_than_that_of_another_host(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Rank 1 has lost its slots of a later step. Of another host both ranks have an earlier one: rank 0 takes
    it, though it has the later one.
    """
    store = HashStore()
    ranks = [Rank({"step": 0}, store=store, rank=rank, ranks=2) for rank in range(2)]
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(Rank.restore, ranks)) == [0, 0]
    for step in (4, 5, 6):
        for rank in ranks:
            rank.state = {"step": step}
            rank.step(step)
        if step == 4:
            OtherHost(monkeypatch, tmp_path, of=4, ranks=2)
    for rank in ranks:
        rank.snapshots.close(finished=False)
    shutil.rmtree(slots.folder_of(slots.job_name(), "group", 1))
    again = [
        Rank({"step": 0}, store=store, rank=rank, ranks=2, life=1, lighthouse="http://h:2")
        for rank in range(2)
    ]
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(Rank.restore, again)) == [4, 4]
    assert [rank.loaded["step"] for rank in again] == [4, 4]
    for rank in again:
        rank.snapshots.close(finished=True)


def test_a_history_that_the_job_has_given_up_is_not_restored() -> None:
    """The host of step 50 was missing, and the job went on from step 30."""
    for group, quorum, steps in (("other", 7, (49, 50)), ("group", 9, (30, 31))):
        rank = Rank({"step": 0}, group=group)
        assert not rank.snapshots.seek(beyond=100)
        for step in steps:
            rank.state = {"step": step}
            rank.snapshots.begin(Position(step, 2 * step, quorum))
            rank.snapshots.end()
        rank.snapshots.close(finished=False)
    for group in ("other", "group"):
        again = Rank({"step": 0}, life=1, group=group)
        assert again.restore() == 31 and again.loaded["step"] == 31
        assert [text for text in again.said if "step 50 is not loaded: the job went on from" in text]
        again.snapshots.close(finished=False)


def test_groups_that_keep_parts_copy_at_the_steps_on_which_they_agree(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Rate, "next", lambda rate, nbytes: 8)
    rank = Rank({"step": 0}, every=None, copies=2)
    rank.restore()
    rank.snapshots.member = 0, 3
    for step in (1, 2):
        rank.step(step)
    assert saved() == [] and rank.snapshots.announces == "2"
    rank.snapshots.agreed = 2
    for step in (3, 4):
        rank.step(step)
    assert saved() == [4] and rank.snapshots.announces == "8" and rank.said.count("news") == 1
    rank.snapshots.agreed = 8
    for step in range(5, 10):
        rank.step(step)
    assert saved() == [8, 4] and rank.said.count("news") == 1
    monkeypatch.setattr(Rate, "next", lambda rate, nbytes: 4)
    rank.snapshots.agreed = 16  # another group needs these
    for step in range(10, 17):
        rank.step(step)
    assert saved() == [16, 8] and rank.snapshots.announces == "8" and rank.said.count("news") == 1
    rank.snapshots.close(finished=True)


def test_a_group_with_a_number_copies_at_the_steps_of_one_that_needs_more() -> None:
    rank = Rank({"step": 0}, every=3, copies=2)
    rank.restore()
    rank.snapshots.member = 0, 3
    assert rank.snapshots.announces == "3"
    rank.snapshots.agreed = 4
    for step in range(1, 9):
        rank.step(step)
    assert sorted(saved()) == [4, 8] and rank.snapshots.announces == "3"
    rank.snapshots.close(finished=True)


def test_what_a_forward_pass_may_change_is_copied_at_once(held: Any) -> None:
    weights, statistics = torch.ones(500_000), torch.ones(4)
    rank = Rank({"weights": weights, "statistics": statistics}, unchanged=[weights.data_ptr()])
    rank.restore()
    released = held()
    rank.begin(1)
    statistics.zero_()  # the forward pass
    released.set()
    rank.snapshots.end()
    weights.zero_()  # the optimizer
    rank.snapshots.close(finished=False)
    again = Rank({"weights": torch.zeros(500_000), "statistics": torch.zeros(4)}, life=1)
    assert again.restore() == 1
    assert again.loaded["weights"].eq(1).all() and again.loaded["statistics"].eq(1).all()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("optimized", [False, True])
def test_a_large_tensor_that_the_forward_pass_changes_is_never_torn(
    late: bool, optimized: bool, held: Any
) -> None:
    """Such as a queue of keys, or weights that follow others. ``late``: the copy is complete when the
    operation ends.
    """
    queue = torch.ones(500_000)
    rank = Rank({"queue": queue, "w": torch.ones(3)}, unchanged=[queue.data_ptr()] if optimized else [])
    rank.restore()
    for step in range(1, 4):
        released = held()
        rank.begin(step)
        if late:
            released.set()
            work = rank.snapshots._work
            assert work is not None and work.ended.wait(30)
        with torch.no_grad():
            queue.fill_(step + 1)
        released.set()
        rank.snapshots.end()
        assert saved() == [[], [2], [3, 2]][step - 1]
    (said,) = [each for each in rank.said if "changed" in each]
    assert said == (
        "the copy of step 1 is not used: ['queue'] changed before the optimizer's step; from now on 1 MiB "
        "more are copied before the forward pass"
    )
    rank.snapshots.close(finished=False)
    again = Rank({"queue": torch.zeros(500_000), "w": torch.zeros(3)}, life=1)
    assert again.restore() == 3
    assert again.loaded["queue"].eq(3).all()


def test_the_weights_change_after_the_end_of_a_copy(held: Any) -> None:
    rank = Rank({"weights": torch.ones(10)})
    rank.restore()
    released = held()
    rank.begin(1)
    with ThreadPoolExecutor(1) as other:
        ended = other.submit(rank.snapshots.end)
        with pytest.raises(TimeoutError):
            ended.result(0.05)
        assert saved() == []
        released.set()
        ended.result(30)
    assert saved() == [1]


def test_a_heal_abandons_a_copy_and_waits_for_nothing(held: Any) -> None:
    rank = Rank({"weights": torch.ones(10)})
    rank.restore()
    rank.step(1)
    released = held()
    rank.begin(2)
    rank.snapshots.abandon()
    released.set()
    rank.snapshots.end()
    assert saved() == [1]
    rank.step(9)  # healed
    assert saved() == [9, 1]


def test_a_copy_for_a_disk_is_spared_until_it_is_written() -> None:
    rank = Rank({"weights": torch.ones(10)})
    rank.snapshots.mark = 2, Due("/x", "k")
    rank.restore()
    for step in range(1, 6):
        rank.step(step)
    assert saved() == [5, 2]
    job = slots.folder_of(slots.job_name(), "group", 0).parents[1]
    write_status(job, {"/x": Status(written=2)})
    rank.step(6)
    assert saved() == [6, 5]


def test_a_step_that_is_due_for_a_disk_is_copied_whatever_the_interval() -> None:
    rank = Rank({"weights": torch.ones(10)}, every=100)
    rank.snapshots.mark = 3, Due("/x", "k")
    rank.restore()
    for step in range(1, 6):
        rank.step(step)
    assert saved() == [3]


def test_the_last_step_of_a_group_that_leaves_is_copied_whatever_the_interval() -> None:
    rank = Rank({"weights": torch.ones(10)}, every=100)
    rank.restore()
    rank.step(42)
    assert saved() == []
    for _ in range(2):
        rank.snapshots.last(Position(42, 84, 7))
    assert saved() == [42]
    rank.snapshots.close(finished=False)
    again = Rank({"weights": torch.zeros(10)}, every=100, life=1)
    assert again.restore() == 42
    again.snapshots.last(Position(42, 84, 7))
    assert saved() == [42], "it is there already"


def test_the_last_copy_of_a_rank_waits_for_no_other_rank() -> None:
    rank = Rank({"weights": torch.ones(10)}, every=None, rank=1, ranks=2)
    rank.snapshots._take_slots()
    rank.snapshots.last(Position(3, 6, 7))
    assert saved(rank=1) == [3]


def test_an_obstacle_that_appears_ends_the_copies() -> None:
    rank = Rank({"weights": torch.ones(10)})
    rank.restore()
    rank.step(1)
    rank.obstacle = "weights of its own"
    rank.step(2)
    rank.step(3)
    assert saved() == [1]
    assert [line for line in rank.said if "no copy of this rank" in line] == [
        "no copy of this rank's state is made in memory any more: weights of its own"
    ]


def test_a_state_that_cannot_be_copied_is_named() -> None:
    rank = Rank({"f": lambda: 0})
    rank.restore()
    rank.step(1)
    assert "its state cannot be copied: ['f'], a builtins.function, cannot be sent" in rank.said[-1]


def test_a_group_without_a_name() -> None:
    rank = Rank({"w": torch.ones(1)})
    rank.snapshots._named = False
    assert rank.restore() == 0
    assert "give Manager a replica_id" in rank.said[-1]


def test_all_ranks_hear_from_rank_0_when_the_next_copy_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    intervals = iter([4, 1, 7, 2, 50])
    monkeypatch.setattr(Rate, "next", lambda rate, nbytes: next(intervals))
    store = HashStore()
    ranks = [Rank({"w": torch.ones(10)}, None, store, rank, 2) for rank in range(2)]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda rank: rank.restore(), ranks))
        for step in range(1, 10):
            list(threads.map(lambda rank, step=step: rank.step(step), ranks))
        assert saved(0) == saved(1) == [7, 6]
        for step in range(10, 40):
            list(threads.map(lambda rank, step=step: rank.step(step), ranks))
    assert saved(0) == saved(1) == [16, 14]
    assert ranks[0].snapshots._next == ranks[1].snapshots._next == 66


def test_if_rank_0_makes_none_the_others_make_none() -> None:
    store = HashStore()
    ranks = [Rank({"w": torch.ones(10)}, None, store, rank, 2) for rank in range(2)]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda rank: rank.restore(), ranks))
        ranks[0].state = {"f": lambda: 0}
        for step in range(1, 4):
            list(threads.map(lambda rank, step=step: rank.step(step), ranks))
    assert "rank 0 of this group makes none" in ranks[1].said[-1]
    assert saved(0) == []


def three(step: int, parts: int = 3, life: int = 0, but: int = -1) -> list[Rank]:
    """Groups that keep two copies of each part, after they have committed a step together; ``but``: one of
    them healed in it.
    """
    weights = {str(i): torch.full((30_000,), float(10 * step + i)) for i in range(5)}
    groups = [
        Rank({"w": weights, "step": step}, every=2, group=f"g{i}", copies=2, life=life) for i in range(3)
    ]
    for group in groups:
        group.restore()
    for i, group in enumerate(groups):
        group.snapshots.member = None if i == but else i, parts
        group.step(step)
        group.snapshots.close(finished=False)
    return groups


def restored(but: int = -1) -> tuple[list[int], list[str]]:
    """The steps with which new groups go on, and what they say."""
    groups = [
        Rank({"w": {str(i): torch.zeros(30_000) for i in range(5)}, "step": 0}, group=f"g{i}", life=9)
        for i in range(3)
        if i != but
    ]
    steps = [group.restore() for group in groups]
    for group in groups:
        if group.loaded is not None:
            step = group.loaded["step"]
            assert all(w.eq(10 * step + int(name)).all() for name, w in group.loaded["w"].items())
        group.snapshots.close(finished=False)
    return steps, [text for group in groups for text in group.said]


def test_groups_that_keep_parts_restore_without_any_one_of_them() -> None:
    three(2)
    three(4, life=1)
    assert {len(list(slots.root().rglob(f"g{i}/rank-0/[01]"))) for i in range(3)} == {2}
    (lost,) = slots.root().glob("*/g1")
    shutil.rmtree(lost)
    steps, said = restored()
    assert steps == [4, 4, 4]
    assert any("of which" in text and "g2/rank-0/1 has a copy" in text for text in said), said


def test_a_step_of_which_a_part_is_missing_is_named_and_the_one_before_is_restored() -> None:
    three(2)
    three(4, life=1)
    for i in (0, 1):
        (path,) = [
            path for path in slots.root().glob(f"*/g{i}/rank-0/[01]") if slots.read_header(path).step == 4
        ]
        slots.invalidate(path)
    steps, said = restored()
    assert steps == [2, 2, 2]
    assert "the copy of step 4 is not loaded: no host that is left has its parts [1]" in said


def test_the_members_change_between_two_copies() -> None:
    three(2)
    three(4, life=1, parts=2, but=2)  # the group that heals keeps none; the two others keep all
    steps, _ = restored()
    assert steps == [4, 4, 4]
    assert [slots.read_header(path).share.whole for path in slots.root().rglob("g0/rank-0/[01]")].count(
        True
    ) == 1
