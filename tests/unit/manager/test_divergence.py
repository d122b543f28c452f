"""The parts of the weights that each step digests, and the comparison of the digests of several groups."""

from __future__ import annotations

import random
from typing import Optional

import pytest

from tests.bounded import often, todays
from torchft._manager.checks.divergence import (
    BUCKETS,
    CPU_PIECE,
    DEVICE_PIECE,
    MOST_SWEEPS,
    NOTHING,
    SHARE,
    WINDOW,
    WORD,
    DigestPace,
    OnDivergence,
    Sweep,
    acts,
    bucket_of,
    comparable,
    compare,
    exchange_steps,
    header,
    sweep_commits,
    unlike,
)


def entry(*digests: int, head: int = 1) -> tuple[int, ...]:
    return (head, *digests, *[0] * (BUCKETS - len(digests)))


@pytest.mark.parametrize(
    ("setting", "total", "on_device", "commits"),
    [
        (None, 0, False, 100),
        (None, 12 << 20, False, 100),
        (None, 1 << 30, False, 8192),
        (None, (1 << 30) + 1, False, 8193),
        (None, 1 << 29, True, 100),
        (None, 100 << 30, True, 12800),
        (7, 100 << 30, True, 7),
    ],
)
def test_the_length_of_a_sweep(setting: Optional[int], total: int, on_device: bool, commits: int) -> None:
    assert sweep_commits(setting, total, on_device) == commits
    if setting is None:
        assert total / commits <= (DEVICE_PIECE if on_device else CPU_PIECE)


def pace_of(sweeps: int) -> DigestPace:
    pace = DigestPace()
    pace.sweeps = sweeps
    return pace


@pytest.mark.parametrize("sweeps", [1, 2, 8])
@pytest.mark.parametrize("commits", [100, 101, 7])
def test_n_sweeps_digest_each_part_once_and_parts_that_faster_groups_digest_too(
    sweeps: int, commits: int
) -> None:
    pace, faster = pace_of(sweeps), pace_of(max(1, sweeps // 2))
    for begin in (0, 3 * sweeps * commits):
        due = [step for step in range(begin, begin + sweeps * commits) if pace.due(step, commits)]
        assert sorted(step % commits for step in due) == list(range(commits))
        assert all(faster.due(step, commits) for step in due)


@pytest.mark.parametrize(
    ("sweeps", "share", "then"),
    [
        (1, 0.9 * SHARE, 1),
        (1, 1.1 * SHARE, 2),
        (4, 1.1 * SHARE, 8),
        (MOST_SWEEPS, 1.1 * SHARE, MOST_SWEEPS),
        (4, 0.3 * SHARE, 4),
        (4, 0.2 * SHARE, 2),
        (1, 0.0, 1),
    ],
)
def test_digests_that_take_too_long_a_share_become_fewer(sweeps: int, share: float, then: int) -> None:
    pace, step_s = pace_of(sweeps), 0.1
    for number in range(WINDOW * sweeps):
        assert pace.sweeps == sweeps
        due = (number + 1) % sweeps == 0
        pace.took(share * step_s * sweeps if due else None, step_s)
    assert pace.sweeps == then


@pytest.mark.parametrize(("setting", "steps"), [(None, 10), (1000, 10), (10, 10), (3, 3), (1, 1)])
def test_how_often_digests_are_sent(setting: Optional[int], steps: int) -> None:
    assert exchange_steps(setting) == steps


@pytest.mark.parametrize(
    ("sizes", "commits", "spans"),
    [
        ([8], 1, [[(0, 0, 8)]]),
        ([8], 2, [[(0, 0, 4)], [(0, 4, 8)]]),
        ([8, 8], 2, [[(0, 0, 8)], [(1, 0, 8)]]),
        ([4, 12], 2, [[(0, 0, 4), (1, 0, 4)], [(1, 4, 12)]]),
        ([5], 2, [[(0, 0, 4)], [(0, 4, 5)]]),  # the last word is not full
        ([0, 4, 0], 1, [[(1, 0, 4)]]),
        ([4], 3, [[], [], [(0, 0, 4)]]),
        ([], 2, [[], []]),
    ],
)
def test_the_bytes_that_a_step_digests(
    sizes: list[int], commits: int, spans: list[list[tuple[int, int, int]]]
) -> None:
    sweep = Sweep(sizes, commits)
    assert [[tuple(span) for span in sweep.spans(step)] for step in range(commits)] == spans
    assert sweep.spans(commits) == sweep.spans(0)


@pytest.mark.parametrize("seed", range(50))
def test_a_sweep_covers_each_byte_once_in_equal_parts(seed: int) -> None:
    choose = random.Random(todays(seed))
    sizes = [choose.choice((0, 1, 2, 3, 4, choose.randrange(5000))) for _ in range(choose.randrange(1, 40))]
    commits = choose.randrange(1, 60)
    first = choose.randrange(1000) * commits
    sweep = Sweep(sizes, commits)
    parts = [sweep.spans(first + i) for i in range(commits)]
    covered = [
        (span.tensor, byte) for spans in parts for span in spans for byte in range(span.begin, span.end)
    ]
    assert covered == [(tensor, byte) for tensor, size in enumerate(sizes) for byte in range(size)]
    assert all(span.begin % WORD == 0 for spans in parts for span in spans)
    words = [sum(-(-(span.end - span.begin) // WORD) for span in spans) for spans in parts]
    assert max(words) - min(words) <= 1


def test_each_span_has_its_own_bucket_if_there_are_enough() -> None:
    assert [bucket_of(i, BUCKETS) for i in range(BUCKETS)] == list(range(BUCKETS))
    shared = [bucket_of(i, 1000) for i in range(1000)]
    assert shared == sorted(shared) and set(shared) == set(range(BUCKETS))


def test_a_header_depends_on_its_lines_and_is_never_0() -> None:
    lines = ["weight torch.float32 (3,) (1,)"]
    assert header(lines, 5) == header(lines, 5) != header(lines, 6)
    assert header(lines, 5) != header([*lines, "bias torch.float32 (3,) (1,)"], 5)
    assert all(0 < header([str(i)], 1) < 2**63 for i in range(1000))


@pytest.mark.parametrize(
    ("entries", "diverged", "buckets", "certain"),
    [
        # three groups and more: the minority
        ([entry(5, 6), entry(5, 7), entry(5, 6)], (1,), (1,), True),
        ([entry(4, 7), entry(5, 6), entry(5, 6)], (0,), (0, 1), True),
        ([entry(1), entry(2), entry(1), entry(3), entry(1)], (1, 3), (0,), True),
        # no group is more than half
        ([entry(1), entry(2)], (1,), (0,), False),
        ([entry(2), entry(1), entry(1), entry(2)], (1, 2), (0,), False),
        ([entry(3), entry(2), entry(1)], (1, 2), (0,), False),
        ([entry(3), entry(1), entry(2), entry(1)], (0, 2), (0,), False),
        # groups that have nothing, or other tensors, do not count
        ([NOTHING, entry(1), entry(1), entry(2)], (3,), (0,), True),
        ([entry(9, head=2), entry(1), entry(2), entry(1)], (2,), (0,), True),
        ([NOTHING, NOTHING, entry(1), entry(2)], (3,), (0,), False),
    ],
)
def test_which_groups_differ(
    entries: list[tuple[int, ...]], diverged: tuple[int, ...], buckets: tuple[int, ...], certain: bool
) -> None:
    found = compare(3, dict(enumerate(entries)))
    assert found is not None
    assert (found.step, found.diverged, found.buckets, found.certain) == (3, diverged, buckets, certain)


@pytest.mark.parametrize(
    "entries",
    [
        [],
        [entry(1)],
        [entry(1), entry(1), entry(1)],
        [NOTHING, NOTHING],
        [NOTHING, entry(1)],
        [entry(1), entry(2, head=2)],
    ],
)
def test_equal_groups_do_not_differ(entries: list[tuple[int, ...]]) -> None:
    assert compare(3, dict(enumerate(entries))) is None


def test_groups_with_other_tensors_are_named() -> None:
    entries = {0: entry(1, head=5), 1: entry(1, head=4), 2: NOTHING, 3: entry(2, head=4)}
    assert comparable(entries) == [1, 3]
    assert unlike(entries) == [0]


@pytest.mark.parametrize(
    ("action", "entries", "acting"),
    [
        (OnDivergence.REPORT, [entry(1), entry(2), entry(1)], []),
        (OnDivergence.HEAL, [entry(1), entry(2), entry(1)], [1]),
        (OnDivergence.EVICT, [entry(1), entry(2), entry(1)], [1]),
        # it is not known which group is right: groups may heal, so that bits are equal, but none is evicted
        (OnDivergence.HEAL, [entry(1), entry(2)], [1]),
        (OnDivergence.EVICT, [entry(1), entry(2)], []),
        # a third group has just healed: with it the next sweep can find a majority
        (OnDivergence.HEAL, [entry(2), entry(1), NOTHING], []),
        (OnDivergence.HEAL, [entry(1), entry(2), entry(1), NOTHING], [1]),
    ],
)
def test_which_groups_act(action: OnDivergence, entries: list[tuple[int, ...]], acting: list[int]) -> None:
    found = compare(3, dict(enumerate(entries)))
    assert found is not None
    assert [rank for rank in range(len(entries)) if acts(action, found, rank, len(entries))] == acting


class Job:
    """A model of groups whose weights differ. ``wrong`` maps each differing byte of a group to the step of
    its flip.
    """

    def __init__(self, choose: random.Random) -> None:
        self.groups = choose.randrange(3, 7)
        self.commits = choose.randrange(1, 25)
        self.every = exchange_steps(self.commits)
        sizes = [choose.randrange(1, 60) for _ in range(choose.randrange(1, 8))]
        self.sweep = Sweep(sizes, self.commits)
        self.starts = [sum(sizes[:i]) for i in range(len(sizes))]
        self.total = sum(sizes)
        self.wrong: list[dict[int, int]] = [{} for _ in range(self.groups)]
        self.entries: list[dict[int, tuple[int, ...]]] = [{} for _ in range(self.groups)]
        self.healing: set[int] = set()  # groups that heal in this step
        self.found = 0

    def heal(self, group: int, source: int) -> None:
        self.wrong[group] = dict(self.wrong[source])
        self.entries[group] = {}
        self.healing.add(group)

    def exchange(self, step: int) -> None:
        """Compares the digests of the last steps. Each group for which a difference is reported heals."""
        for digested in range(step - self.every, step):
            difference = compare(
                digested, {rank: each.get(digested, NOTHING) for rank, each in enumerate(self.entries)}
            )
            if difference is None:
                continue
            assert all(self.wrong[group] for group in difference.diverged)
            for group in difference.diverged:
                if acts(OnDivergence.HEAL, difference, group, self.groups):
                    self.found += 1
                    self.heal(
                        group, next(rank for rank in difference.compared if rank not in difference.diverged)
                    )

    def digest(self, step: int) -> None:
        for group in range(self.groups):
            spans = [] if group in self.healing else self.sweep.spans(step)
            if group not in self.healing:
                read = [self.starts[span.tensor] + i for span in spans for i in range(span.begin, span.end)]
                self.entries[group][step] = entry(sum(1 + byte for byte in read if byte in self.wrong[group]))
        self.healing.clear()


@pytest.mark.parametrize("seed", range(often(800)))
def test_random_histories(seed: int) -> None:
    """Bits flip, groups heal for other reasons and steps are lost: a difference is reported in time for the
    group that differs, and for no other group.
    """
    choose = random.Random(todays(seed))
    job, flips, step = Job(choose), 0, 0
    while step < 150:
        if not any(job.wrong) and choose.random() < 0.3:
            flips += 1
            job.wrong[choose.randrange(job.groups)] = {choose.randrange(job.total): step}
        if step % job.every == 0 and step:
            job.exchange(step)
        for group in range(job.groups):
            latest = step - job.commits - job.every
            late = {byte: since for byte, since in job.wrong[group].items() if since <= latest}
            assert not late, f"step {step}: bytes {late} of group {group} differ, and nothing was reported"
        if not any(job.wrong) and choose.random() < 0.1:
            job.heal(*choose.sample(range(job.groups), 2))
        job.digest(step)
        step += choose.random() > 0.1  # otherwise the step is lost and repeated
    assert job.found >= flips - 1 > 0
