"""The records that Python and the Go core exchange: quorums, requests for them, results, failures.

Their attributes have the names of the JSON tags in Go (go/round, go/recovery, go/pyapi).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from operator import index
from typing import Any

_INT64_MAX = 2**63 - 1


def integer(name: str, value: int, least: int) -> int:
    """Returns the value if Go's int64 can hold it and it is at least ``least``."""
    if not isinstance(value, int):
        raise TypeError(f"{name}={value!r} is not allowed; allowed: an int")
    if not least <= value <= _INT64_MAX:
        raise ValueError(
            f"{name}={value!r} is not allowed; allowed: at least {least} and at most {_INT64_MAX}"
        )
    return value


@dataclass
class Timestamp:
    """A point in time since the Unix epoch.

    Args:
        seconds: whole seconds.
        nanos: nanoseconds on top of them.
    """

    seconds: int = 0
    nanos: int = 0


@dataclass
class QuorumMember:
    """A replica group, described by its request for a quorum.

    Args:
        replica_id: unique in the job, and new after each restart.
        address: address of its manager server.
        store_address: address of its store.
        step: the step in progress in the group.
        world_size: number of ranks in the group.
        shrink_only: whether the quorum must have no new members.
        data: a value that the user attached; None if there is none.
    """

    replica_id: str = ""
    address: str = ""
    store_address: str = ""
    step: int = 0
    world_size: int = 0
    shrink_only: bool = False
    data: dict[str, Any] | None = None


@dataclass
class Quorum:
    """The replica groups that train the next step together.

    Args:
        quorum_id: number that increases when the set of members changes; never reused in a job.
        participants: the members, ordered by ``replica_id``.
        created: time at which the lighthouse formed it.
    """

    quorum_id: int = 0
    participants: list[QuorumMember] = field(default_factory=list)
    created: Timestamp = field(default_factory=Timestamp)


@dataclass
class QuorumRequest:
    """A rank's request for a quorum.

    Args:
        group_rank: rank of this process in its group, at least 0.
        step: the step in progress. Comparisons of requests ignore it.
        checkpoint_metadata: metadata of this rank's checkpoint transport, for groups that heal from it.
        shrink_only: the quorum must have no new members.
        commit_failures: number of consecutive steps that this rank did not commit.
        init_sync: at step 0, all groups but the primary heal from it.
        reconfigure_handle: handle of this rank's process group; empty if it has none.
        group_world_size: number of ranks of the group; the server refuses one that differs from its own. 0:
            not known.
        committed_quorum_id: the quorum in which this rank's weights were committed; -1: none since the start
            of its process, 0: not known.
        replays_failed_steps: whether this rank replays failed steps. Its group does if all of its ranks do.
        asks_each_step: whether this rank's group asks for each step, so that no quorum with it stands
            (LocalSGD).
        cuts_by_speed: whether this rank's loader cuts batches by the speeds of the groups, if all groups do.
        layout: digest and size of the tensors that this rank reduces; empty: not known. The lighthouse
            refuses a group that reduces other tensors than the groups of the job.
        drain: whether this rank requests that its group drains. The result reports that to all ranks of the
            group.
        traceparent: the W3C trace context of the step and the vote on it; empty: this rank does not trace.
    """

    group_rank: int
    step: int = field(compare=False)
    checkpoint_metadata: str
    shrink_only: bool
    commit_failures: int
    init_sync: bool = True
    reconfigure_handle: str = ""
    group_world_size: int = 0
    committed_quorum_id: int = 0
    replays_failed_steps: bool = False
    asks_each_step: bool = False
    cuts_by_speed: bool = False
    layout: str = ""
    drain: bool = False
    traceparent: str = field(default="", compare=False)

    def as_upstream(self) -> dict[str, Any]:
        """Returns the arguments of upstream's ``ManagerClient._quorum``."""
        return {name: getattr(self, name) for name in _UPSTREAM_REQUEST}

    def _to_json(self) -> str:
        values: dict[str, Any] = {}
        for named in fields(self):
            if named.name == "traceparent":  # it differs at each step, so a separate call sends it
                continue
            value = getattr(self, named.name)
            if named.type == "int":
                value = integer(named.name, index(value), -_INT64_MAX - 1)
            elif named.type == "bool":
                value = bool(value)
            elif not isinstance(value, str):
                raise TypeError(f"{named.name}={value!r} is not allowed; allowed: a str")
            values[named.name] = value
        return json.dumps(values)


_UPSTREAM_REQUEST = (
    "group_rank",
    "step",
    "checkpoint_metadata",
    "shrink_only",
    "commit_failures",
    "init_sync",
    "reconfigure_handle",
)


@dataclass
class QuorumResult:
    """The result of a quorum for one rank.

    Args:
        quorum_id: number of the quorum. When it changes, the process group is reconfigured.
        replica_rank: rank of this group among the participants.
        replica_world_size: number of participants.
        recover_src_manager_address: manager of the group to heal from; empty unless ``heal``.
        recover_src_replica_rank: rank of that group; None unless ``heal``.
        recover_dst_replica_ranks: groups that heal from this one.
        store_address: rendezvous store of this rank.
        max_step: largest step among the participants.
        max_replica_rank: rank of this group among the participants at ``max_step``; None if it is behind.
        max_world_size: number of participants at ``max_step``.
        heal: whether this group has to heal.
        commit_failures: the largest value that a participant reported.
        replica_ids: replica ids of the participants, in the order of their ranks.
        reconfigure_handles: handles of the process groups of this group rank, one for each participant, in
            the order of ``replica_ids``; empty unless all sent one.
        replicas_without_handles: replica ids of the participants that sent none.
        committed_quorum_id: the quorum in which the weights of ``max_step`` were committed; -1: none since
            their groups started, 0: not every participant sends it.
        replay: whether this group may reduce the gradients that it kept of ``max_step`` again: it is up to
            date, and all participants replay failed steps.
        additional_source_addresses: managers of this group's additional sources; empty unless ``heal``.
        help_dst_replica_ranks: groups that heal from another one, and use this one as an additional source.
        draining: whether this group drains, so that this is its last step.
        speeds: how fast the participants are, in the order of their ranks, for the cut of a batch: only the
            ratios count. Empty: equally fast.
        max_speeds: the same of the participants at ``max_step``.
        skipped: units of batches that all groups leave out, named as by the loader that reported them.
    """

    quorum_id: int = 0
    replica_rank: int = 0
    replica_world_size: int = 1
    recover_src_manager_address: str = ""
    recover_src_replica_rank: int | None = None
    recover_dst_replica_ranks: list[int] = field(default_factory=list)
    store_address: str = ""
    max_step: int = 0
    max_replica_rank: int | None = None
    max_world_size: int = 1
    heal: bool = False
    commit_failures: int = 0
    replica_ids: list[str] = field(default_factory=list)
    reconfigure_handles: list[str] = field(default_factory=list)
    replicas_without_handles: list[str] = field(default_factory=list)
    committed_quorum_id: int = 0
    replay: bool = False
    additional_source_addresses: list[str] = field(default_factory=list)
    help_dst_replica_ranks: list[int] = field(default_factory=list)
    draining: bool = False
    speeds: list[int] = field(default_factory=list)
    max_speeds: list[int] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class MemberFailure:
    """A failed member of a quorum, as reported by the lighthouse.

    Args:
        quorum_id: number of the quorum that it was in.
        replica_id: replica id of the failed group.
        reason: the cause, as a message.
        step: it has done its part of the steps before this one; 0: that is not known of any step.
    """

    quorum_id: int
    replica_id: str
    reason: str
    step: int = 0
