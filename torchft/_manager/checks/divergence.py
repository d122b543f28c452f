"""Which part of the weights is digested in which step, and whether the digests agree. Does not import torch.

All weights and optimizer state of a rank form one sequence of 32-bit words. A *sweep* of n commits digests
each word once. Which words belong to a step depends on the step's number and the tensor sizes only, so all
groups digest the same words between the same two optimizer steps. The digests of :data:`EXCHANGE` steps are
sent together, in the first reduction of the next step; a bit that differs from step s on is found before step
``s + n + EXCHANGE`` is committed.

A message has one row per group, and a row one entry per step: a header and :data:`BUCKETS` digests. The
header identifies what was digested (names, shapes, the length of the sweep); only digests with equal headers
are compared. The header is 0 if a group has nothing to compare, because it healed, has just begun, or is a
spare.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, Optional

from torchft._manager.settings import OnDivergence

WORD = 4  # bytes
EXCHANGE = 10  # steps between two messages: each message costs as much as a small collective
BUCKETS = 8  # digests per step: with the default settings mostly one per tensor
# Default minimum of commits in a sweep, so that small models digest only few tensors per step.
LEAST_SWEEP = 100
# Default number of bytes that a step digests. A device reads 8 MiB in less than 0.1 ms.
CPU_PIECE = 1 << 17
DEVICE_PIECE = 8 << 20
# On a device the time of digests is that of the host, which starts a few kernels for each tensor.
SHARE = 0.005  # largest part of the time of a step
WINDOW = 32  # digests after which it is judged
MOST_SWEEPS = 64

Entry = Sequence[int]  # a header, and BUCKETS digests
NOTHING: tuple[int, ...] = (0,) * (1 + BUCKETS)


class Span(NamedTuple):
    """Bytes of a tensor."""

    tensor: int  # index of the tensor
    begin: int
    end: int


@dataclass(frozen=True)
class Difference:
    """A difference between groups whose weights should be equal.

    Attributes:
        step: step in which the weights were digested.
        buckets: the indices of the digests that differ.
        diverged: the replica ranks of the groups that differ from the largest class of equal groups; of two
            classes of the same size, the one with the lowest replica rank counts as the largest.
        compared: the replica ranks of all groups that were compared.
        certain: whether more than half of the compared groups are equal.
    """

    step: int
    buckets: tuple[int, ...]
    diverged: tuple[int, ...]
    compared: tuple[int, ...]
    certain: bool


def sweep_commits(setting: Optional[int], total_bytes: int, on_device: bool) -> int:
    """Returns the number of commits in a sweep.

    Args:
        setting: the user's setting; None: the total divided by :data:`CPU_PIECE` or :data:`DEVICE_PIECE`.
        total_bytes: size of the weights and the optimizer state.
        on_device: whether they are on another device than the CPU.
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
        sizes: size of each tensor in bytes.
        commits: number of commits in a sweep.
    """

    def __init__(self, sizes: Sequence[int], commits: int) -> None:
        self.sizes = sizes
        self.commits = commits
        self._ends = list(accumulate((-(-size // WORD) for size in sizes), initial=0))

    def spans(self, step: int) -> list[Span]:
        """The spans that a step digests: those of a sweep cover each byte once, in about equal parts."""
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


class DigestPace:
    """Limits the time that digests take to :data:`SHARE` of the steps' time.

    With n ``sweeps`` a rank digests one part in n, so that n sweeps digest each part once. Groups choose
    ``sweeps`` by themselves: it is a power of two, and the parts of a larger one are among those of a smaller
    one, so that they have parts to compare.

    Attributes:
        sweeps: sweeps in which each part is digested once.
    """

    def __init__(self) -> None:
        self.sweeps = 1
        self._reset()

    def _reset(self) -> None:
        self._digests, self._cost_s, self._elapsed_s = 0, 0.0, 0.0

    def due(self, step: int, commits: int) -> bool:
        """Whether a step digests its part, in sweeps of this length."""
        return (step // commits + step % commits) % self.sweeps == 0

    def took(self, cost_s: Optional[float], elapsed_s: float) -> None:
        """Counts a step.

        Args:
            cost_s: duration of its digests; None: it was not due.
            elapsed_s: duration of the step.
        """
        self._elapsed_s += elapsed_s
        if cost_s is None:
            return
        self._digests += 1
        self._cost_s += cost_s
        if self._digests < WINDOW:
            return
        if self._cost_s > SHARE * self._elapsed_s:
            self.sweeps = min(MOST_SWEEPS, 2 * self.sweeps)
        elif self._cost_s < SHARE * self._elapsed_s / 4:
            self.sweeps = max(1, self.sweeps // 2)
        self._reset()


def bucket_of(span: int, spans: int) -> int:
    """The bucket of a span of a step. If there are more spans than buckets, neighboring spans share one."""
    return span if spans <= BUCKETS else span * BUCKETS // spans


def header(lines: Sequence[str], commits: int) -> int:
    """Identifies what is digested, in 63 bits, and is never 0. Only digests with the same header are
    compared.

    Args:
        lines: name, dtype, shape and strides of each tensor.
        commits: number of commits in a sweep.
    """
    text = "\n".join([str(commits), *lines])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1 | 1


def compare(step: int, entries: Mapping[int, Entry]) -> Optional[Difference]:
    """Compares the entries of the groups for a step. Returns None if they are equal or there is nothing to
    compare.

    Args:
        step: step of the entries.
        entries: the entries of the groups, by replica rank.
    """
    alike = {rank: tuple(entries[rank]) for rank in comparable(entries)}
    # In the order of ranks, so a tie goes to the class with the lowest rank.
    classes = Counter(alike.values())
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
    """Whether a group heals or ends because of a difference, and does not only report it.

    Without a majority of equal groups it is not known which of them is right, so no group is evicted. A heal
    makes them equal, though possibly wrong; it is done only if all groups of the quorum were compared.
    Otherwise the next sweep compares more groups and may find a majority.

    Args:
        action: the setting of the group.
        difference: the difference found.
    """
    if rank not in difference.diverged or action is OnDivergence.REPORT:
        return False
    return difference.certain or (action is OnDivergence.HEAL and len(difference.compared) == groups)


def comparable(entries: Mapping[int, Sequence[Any]]) -> list[int]:
    """The replica ranks of the groups that are compared: those with the most frequent header."""
    headers = Counter(entries[rank][0] for rank in sorted(entries) if entries[rank][0] != 0)
    if not headers:
        return []
    most = headers.most_common(1)[0][0]
    return [rank for rank in sorted(entries) if entries[rank][0] == most]


def unlike(entries: Mapping[int, Sequence[Any]]) -> list[int]:
    """The replica ranks of the groups whose header differs from that of most: they hold other tensors."""
    compared = comparable(entries)
    return [rank for rank in sorted(entries) if entries[rank][0] != 0 and rank not in compared]
