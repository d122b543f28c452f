"""Whether the groups of a quorum train on the same batch, and whether they have ended. Pure, and free of torch.

Groups tell each other their :class:`~torchft.data.position.Stamp` whenever the quorum has changed. All decide on the
same stamps, and so come to the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum

from torchft.data.position import Position, Stamp


class Verdict(Enum):
    """What a group does in a step.

    TRAINS: it is at the job's position.
    HEALS: it takes over state, and the position with it; until then nothing of it may count.
    REFUSED: its settings are not those of the job. No heal mends that: it has to go.
    """

    TRAINS = "trains"
    HEALS = "heals"
    REFUSED = "refused"


@dataclass(frozen=True)
class Finding:
    """A verdict on one group, and why: empty if it trains."""

    verdict: Verdict
    reason: str = ""


@dataclass(frozen=True)
class Agreement:
    """What a quorum has found.

    Attributes:
        position: of the job. A group that heals is there after its heal.
        ended: the job is at its end: all leave, those that heal after they have healed.
        groups: a finding for each group.
    """

    position: Position
    ended: bool
    groups: dict[str, Finding]


def compare(stamps: Mapping[str, Stamp], participants: Collection[str]) -> Agreement:
    """Finds the job's position, and who is not there.

    The job is where most participants are; of two equally many, where the first of them is, by name.

    Args:
        stamps: of all groups of the quorum, by replica id.
        participants: those of them that have the newest weights. The others heal, wherever they are.

    Raises:
        ValueError: there are no participants, or one of them has no stamp.
    """
    unknown = sorted(set(participants) - set(stamps))
    if unknown or not participants:
        raise ValueError(f"participants is {sorted(participants)}: allowed are one or more of {sorted(stamps)}")
    job = Counter(stamps[name] for name in sorted(participants)).most_common(1)[0][0]
    groups = {name: _find(name, stamp, job, name in participants) for name, stamp in sorted(stamps.items())}
    return Agreement(Position(job.epoch, job.batch), job.epoch >= job.epochs, groups)


def _find(name: str, stamp: Stamp, job: Stamp, participant: bool) -> Finding:
    if participant and stamp == job:
        return Finding(Verdict.TRAINS)
    differing = [
        f"{field} is {ours}, the others have {others}"
        for field, ours, others in zip(Stamp._fields, stamp.plan, job.plan)
        if ours != others
    ]
    if differing:
        return Finding(Verdict.REFUSED, f"group {name} does not belong to this job: {', '.join(differing)}")
    return Finding(
        Verdict.HEALS,
        f"group {name} heals from batch {stamp.batch} of epoch {stamp.epoch} to batch {job.batch} of epoch {job.epoch}",
    )
