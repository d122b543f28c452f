"""Decides whether the groups of a quorum train on the same batch, which of them heal if not, and when they
end. Pure.

In the first reduction of a quorum each participant adds an :func:`entry`: its number of samples, and a digest
of its settings and position. All participants get the same sum, and each one evaluates it by itself. If all
digests are equal, the sum is the digest times the number of entries, which is the number of participants
unless entries are missing. If digests differ, the first group that is up to date counts as right. Each group
that differs from it announces in the next quorum the step before its own, so that it heals. The manager
(``torchft/_manager/checks/loader.py``), the loader, and the random histories of the tests call these
functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum


class GroupAction(Enum):
    """The action of a group in a quorum."""

    TRAINS = "reduces gradients, or zeros in their place"
    ENDS = "is at the end, and believes that all others are, too: it compares, and ends"
    PASSES = "is at the end, and skips the step, in which others heal"


class Verdict(Enum):
    """The result of a group's comparison, from the sum of the entries."""

    ALIKE = "all participants are at the position of this group"
    INCOMPLETE = "the step is not committed: entries are missing in the sum; the others equal this group's"
    DIFFERS = "the step is not committed"
    GIVES_WAY = "the step is not committed, and this group heals"


def next_action(*, at_end: bool, heals_in_background: bool, all_up_to_date: bool) -> GroupAction:
    """Decides the action of a group in a quorum.

    Args:
        at_end: whether this group is at the end of the data; if it heals before the step, after that heal.
        heals_in_background: whether it takes over another position during the step.
        all_up_to_date: whether all groups of the quorum are at its newest step. All groups get the same
            value.
    """
    if not at_end or heals_in_background:
        return GroupAction.TRAINS
    return GroupAction.ENDS if all_up_to_date else GroupAction.PASSES


def entry(samples: int, digest: str) -> tuple[int, int, int]:
    """The entry of a participant: its number of samples, and its digest as two numbers of 32 bits, so that
    sums over any number of groups fit into 64 bits.

    Args:
        samples: number of this rank's samples in the reduced tensors.
        digest: 64 bits in hex, equal in all groups with the same settings and position.
    """
    return samples, int(digest[:8], 16), int(digest[8:], 16)


def judge(sums: Sequence[int], digest: str, *, participants: int, leads: bool, heals: bool) -> Verdict:
    """Compares the sum with the group's own entry. :meth:`torchft.data.position.RankShare.check` finds
    missing samples.

    Entries are missing if a group could not heal before the step, and added zeros. That is no reason to heal:
    at step 0 a group would have to announce step -1, where init_sync heals no group, and groups could train
    on different weights.

    Args:
        sums: sums of the entries.
        digest: digest of this group: after its heal, if it heals in this step.
        participants: number of groups that add an entry.
        leads: whether this group is the first one that is up to date.
        heals: whether it takes over another state anyway.
    """
    _, *alike = entry(0, digest)
    for entries in range(participants + 1):
        if list(sums[1:]) == [entries * half for half in alike]:
            return Verdict.ALIKE if entries == participants else Verdict.INCOMPLETE
    return Verdict.DIFFERS if leads or heals else Verdict.GIVES_WAY


def step_to_announce(step: int, verdict: Verdict) -> int:
    """The step that a group announces for the next quorum; a smaller one if it must heal."""
    return step - 1 if verdict is Verdict.GIVES_WAY else step
