"""Counts the samples in the weights of a job, from the events of its groups. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

Event = dict[str, Any]


class Samples(NamedTuple):
    """Counts over all epochs: samples trained on, repeated within an epoch, and missing in an epoch."""

    trained: int
    twice: int
    missed: int


def samples(survivor: Sequence[Event], everybody: Sequence[Event], length: int, epochs: int) -> Samples:
    """Counts the samples in the final weights of a job.

    Each step of the final weights was committed in one quorum, by the survivor or by a group from which the
    survivor healed. The samples that all groups added in that quorum count, including those of a group that
    was killed after its vote.

    Args:
        survivor: events of a rank that participated until the last step.
        everybody: events of all ranks of all groups.
        length: number of samples in the dataset.
        epochs: number of epochs of the job.
    """
    commits = [event for event in [*everybody, *survivor] if event["event"] == "commit"]
    # the survivor's events come last, and override others
    quorum_of = {event["step"] - 1: event["quorum"] for event in commits}
    counts: dict[int, Counter[int]] = defaultdict(Counter)
    for event in everybody:
        if event["event"] == "trained" and quorum_of.get(event["step"]) == event["quorum"]:
            counts[event["epoch"]].update(event["indices"])
    return Samples(
        trained=sum(each.total() for each in counts.values()),
        twice=sum(times - 1 for each in counts.values() for times in each.values()),
        missed=epochs * length - sum(len(each) for each in counts.values()),
    )
