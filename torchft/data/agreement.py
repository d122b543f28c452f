"""Whether the groups of a quorum train on the same batch, which of them heal if not, and when they end. Pure; no torch.

In the first reduction of a quorum each participant adds an :func:`entry`: its samples, and a digest of its settings and
position. All get the same sum, and each judges alone. If all digests are alike, their sum is a multiple of each: by the
number of participants, or by fewer if entries are missing. If not, the first group that is up to date is right, and
each other one says in the next quorum that it is a step behind, so that it heals. The manager
(``torchft/_manager/loader.py``), the loader, and the random histories of the tests call these functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum


class Turn(Enum):
    """The action of a group in a quorum."""

    TRAINS = "reduces gradients, or zeros in their place"
    ENDS = "is at the end like all others, as far as it knows: it compares, and leaves"
    PASSES = "is at the end, and leaves out the step, in which others heal"


class Verdict(Enum):
    """The result of a group's comparison, from the sum of the entries."""

    ALIKE = "all participants are where this group is"
    INCOMPLETE = "the step is not committed: others are where this group is, and some are missing in the sum"
    DIFFERS = "the step is not committed"
    GIVES_WAY = "the step is not committed, and this group heals"


def turn(*, at_end: bool, heals_in_background: bool, all_up_to_date: bool) -> Turn:
    """Decides the action of a group in a quorum.

    Args:
        at_end: whether this group is at the end of the data, after a heal that precedes the step.
        heals_in_background: whether it takes over another position within the step.
        all_up_to_date: whether all groups of the quorum have its newest step, the same on all of them.
    """
    if not at_end or heals_in_background:
        return Turn.TRAINS
    return Turn.ENDS if all_up_to_date else Turn.PASSES


def entry(samples: int, digest: str) -> tuple[int, int, int]:
    """The entry of a participant: its samples, and its digest as two numbers of 32 bits, so that sums over any number
    of groups fit into 64 bits.

    Args:
        samples: this rank's samples in the reduced tensors.
        digest: 64 bits in hex, equal in all groups with the same settings and position.
    """
    return samples, int(digest[:8], 16), int(digest[8:], 16)


def judge(sums: Sequence[int], digest: str, *, participants: int, leads: bool, heals: bool) -> Verdict:
    """Compares the sum with the group's own entry. :meth:`torchft.data.position.Share.check` finds missing samples.

    Entries are missing if a group could not heal before the step, and added zeros. That is no reason to give way: at
    step 0 it would take groups to step -1, where init_sync heals none, and they could train on different weights.

    Args:
        sums: of the entries.
        digest: of this group: after its heal, if it heals in this step.
        participants: whose entries are in the sums.
        leads: whether this group is the first one that is up to date.
        heals: whether it takes over another state anyway.
    """
    _, *alike = entry(0, digest)
    for entries in range(participants + 1):
        if list(sums[1:]) == [entries * half for half in alike]:
            return Verdict.ALIKE if entries == participants else Verdict.INCOMPLETE
    return Verdict.DIFFERS if leads or heals else Verdict.GIVES_WAY


def step_to_say(step: int, verdict: Verdict) -> int:
    """The step that a group announces for the next quorum. A group that must heal announces a smaller
    one than its peers.
    """
    return step - 1 if verdict is Verdict.GIVES_WAY else step
