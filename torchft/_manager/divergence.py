"""Which part of the weights is digested in which step, and what the digests of the groups say. Pure, and free of torch.

All weights and optimizer state of a rank are one row of words of 32 bits. A *sweep* of n commits goes over it once: the
part of a step is a function of its number and the sizes alone, so all groups digest the same words between the same two
steps of their optimizers. Digests of :data:`EXCHANGE` steps travel together, in the first reduction of the step after
them; a bit that differs from step s on is found before step ``s + n + EXCHANGE`` is committed.

A message has a row for each group, and a row an entry for each step: a header, and :data:`BUCKETS` digests. The header
says what was digested (names, shapes, the length of the sweep): digests are compared where it is the same. It is 0
where a group has nothing to compare: it healed, began, or is a spare.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from typing import NamedTuple, Optional

WORD = 4  # bytes
EXCHANGE = 10  # steps between two messages: each costs as much as any small collective
BUCKETS = 8  # digests of a step: with the default settings mostly one for each tensor
LEAST_SWEEP = 100  # commits, if the setting does not say: of a small model few tensors a step
# Bytes that a step digests, if the setting does not say.
CPU_PIECE = 1 << 17
DEVICE_PIECE = 32 << 20

Entry = Sequence[int]  # a header, and BUCKETS digests
NOTHING: tuple[int, ...] = (0,) * (1 + BUCKETS)


class OnDivergence(Enum):
    """What a group does that differs from most others.

    REPORT: it trains on; log, events and metrics name it.
    HEAL: it takes over the state of another group.
    EVICT: ``should_commit`` raises in it, so that it ends.
    """

    REPORT = "report"
    HEAL = "heal"
    EVICT = "evict"


class Span(NamedTuple):
    """Bytes of a tensor."""

    tensor: int  # its index
    begin: int
    end: int


@dataclass(frozen=True)
class Difference:
    """Groups that should have been alike.

    Attributes:
        step: in which the weights were digested.
        buckets: whose digests differ.
        diverged: the replica ranks of the groups that differ from most; of two classes of groups of one size, those of
            which the first group is not.
        compared: the replica ranks of all groups that were compared.
        certain: whether more than half of these are alike.
    """

    step: int
    buckets: tuple[int, ...]
    diverged: tuple[int, ...]
    compared: tuple[int, ...]
    certain: bool


def sweep_commits(setting: Optional[int], total_bytes: int, on_device: bool) -> int:
    """The commits of a sweep.

    Args:
        setting: the user's; None: as many as pieces of :data:`CPU_PIECE` or :data:`DEVICE_PIECE` take.
        total_bytes: of weights and optimizer state.
        on_device: whether they lie on another device than the CPU.
    """
    if setting is not None:
        return setting
    return max(LEAST_SWEEP, -(-total_bytes // (DEVICE_PIECE if on_device else CPU_PIECE)))


def exchange_steps(setting: Optional[int]) -> int:
    """Steps between two messages."""
    return EXCHANGE if setting is None else min(EXCHANGE, setting)


class Sweep:
    """Cuts tensors into the parts of a sweep.

    Args:
        sizes: bytes of each tensor.
        commits: of a sweep.
    """

    def __init__(self, sizes: Sequence[int], commits: int) -> None:
        self.sizes = sizes
        self.commits = commits
        self._ends = list(accumulate((-(-size // WORD) for size in sizes), initial=0))

    def spans(self, step: int) -> list[Span]:
        """What a step digests. Parts of one sweep cover each byte once; two of them differ by at most a word."""
        words, part = self._ends[-1], step % self.commits
        begin, end = words * part // self.commits, words * (part + 1) // self.commits
        spans = []
        for index in range(max(0, bisect_right(self._ends, begin) - 1), len(self.sizes)):
            start = self._ends[index]
            if start >= end:
                break
            size = self.sizes[index]
            first, last = max(0, begin - start) * WORD, min(size, (end - start) * WORD)
            if first < last:
                spans.append(Span(index, first, last))
        return spans


def bucket_of(span: int, spans: int) -> int:
    """The bucket of a span of a step: its own where there are enough, else one that it shares with its neighbours."""
    return span if spans <= BUCKETS else span * BUCKETS // spans


def header(lines: Sequence[str], commits: int) -> int:
    """What digests are of, in 63 bits and never 0. They are compared where it is the same.

    Args:
        lines: name, dtype, shape and strides of each tensor.
        commits: of a sweep.
    """
    text = "\n".join([str(commits), *lines])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1 | 1


def compare(step: int, entries: Mapping[int, Entry]) -> Optional[Difference]:
    """What the entries of the groups for a step say; None if they are alike, or cannot be compared.

    Args:
        step: of the entries.
        entries: by replica rank.
    """
    alike = {rank: tuple(entries[rank]) for rank in comparable(entries)}
    classes = Counter(alike.values())  # in the order of ranks: the first of the largest is that of the least rank
    if len(classes) < 2:
        return None
    most, count = classes.most_common(1)[0]
    return Difference(
        step=step,
        buckets=tuple(i for i in range(len(most) - 1) if len({entry[1 + i] for entry in classes}) > 1),
        diverged=tuple(rank for rank, entry in alike.items() if entry != most),
        compared=tuple(alike),
        certain=2 * count > len(alike),
    )


def acts(action: OnDivergence, difference: Difference, rank: int, groups: int) -> bool:
    """Whether a group does more about a difference than to report it.

    Where nobody is more than half, a heal makes groups equal, if not right: in a quorum of more groups than those that
    were compared, the next sweep will tell. No group ends for it.

    Args:
        action: of the group.
        difference: that was found.
        rank: of the group.
        groups: in the quorum.
    """
    if rank not in difference.diverged or action is OnDivergence.REPORT:
        return False
    return difference.certain or (action is OnDivergence.HEAL and len(difference.compared) == groups)


def comparable(entries: Mapping[int, Entry]) -> list[int]:
    """The replica ranks of the groups that are compared: with the header that most of them have."""
    headers = Counter(entries[rank][0] for rank in sorted(entries) if entries[rank][0] != 0)
    if not headers:
        return []
    most = headers.most_common(1)[0][0]
    return [rank for rank in sorted(entries) if entries[rank][0] == most]


def unlike(entries: Mapping[int, Entry]) -> list[int]:
    """The replica ranks of the groups whose header differs from that of most: they hold other tensors."""
    compared = comparable(entries)
    return [rank for rank in sorted(entries) if entries[rank][0] != 0 and rank not in compared]
