"""Turns the result of a quorum into what this rank has to do. Pure, and free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property, partial
from typing import TYPE_CHECKING, Optional

from torchft._agreement import AVERAGES, HEALS, IN_PASSING, RESTORES, SNAPSHOTS, all_announce, announced

if TYPE_CHECKING:
    from torchft._torchft import QuorumResult


class WorldSizeMode(Enum):
    """How many groups may take part in a step.

    DYNAMIC: all groups of the quorum; an average is divided by the number of groups that take part.
    FIXED_WITH_SPARES: exactly ``min_replica_size``; further groups are spares that contribute zeros.
    """

    DYNAMIC = 0
    FIXED_WITH_SPARES = 1


@dataclass(frozen=True)
class Plan:
    """The part of one rank in a quorum: whether it participates, heals, or serves its state."""

    quorum_id: int
    replica_rank: int
    replica_world_size: int
    replica_ids: list[str]
    store_address: str
    handles: list[str]
    # Replica ids of the groups without a handle, as reported by the manager server.
    without_handles: list[str]
    max_step: int
    # The quorum in which the weights of max_step were committed; -1: none, 0: not known.
    committed_quorum_id: int
    # None: this group contributes zeros (it is a spare, or behind the others)
    participating_rank: Optional[int]
    participants: int  # an average is divided by it
    num_up_to_date: int  # groups at max_step
    up_to_date: bool  # at max_step, before any heal
    # Whether this quorum replays a step that failed, here or in another group at max_step
    replay: bool
    source: Optional[HealSource]  # the assigned source; None if this group does not heal
    additional_sources: list[str]  # manager servers of further groups that offer the same step
    recover_dst: list[int]  # groups that heal from this one
    help_dst: list[int]  # groups that heal from another assigned source, and may also use this group
    draining: bool = False  # whether the group drains: this is its last step
    # whether a heal runs while the model computes; otherwise it ends before the forward pass
    in_background: bool = True
    leads: bool = False  # whether this group is the first of those at max_step
    # of the participants, by which they cut a batch; empty: they are equally fast
    speeds: tuple[int, ...] = ()
    skipped: tuple[str, ...] = ()  # units of batches that all groups leave out

    @cached_property
    def heal(self) -> bool:
        return self.source is not None

    @cached_property
    def serves(self) -> bool:
        """Whether this group is a source, or an additional one."""
        return bool(self.recover_dst or self.help_dst)

    @cached_property
    def quiet(self) -> bool:
        """Whether no group heals in this quorum: once followed, later steps have nothing to follow."""
        all_up_to_date = self.num_up_to_date == self.replica_world_size
        return all_up_to_date and not (self.heal or self.serves or self.awaits_heals)

    @cached_property
    def averages(self) -> bool:
        """Whether the process groups average, instead of adding up for a division: all groups participate,
        and each announces that its process group can. The same in all groups of a quorum.
        """
        everyone = self.participants == self.replica_world_size == len(self.handles)
        return everyone and all_announce(self.handles, AVERAGES)

    @cached_property
    def awaits_heals(self) -> bool:
        """Whether groups may heal in this quorum, or load a copy, and each announces that it waits for them:
        see heal/wait.py. The same in all groups of a quorum.
        """
        may_heal = (
            self.num_up_to_date < self.replica_world_size
            or self.max_step == 0
            or any(announced(handle, RESTORES) for handle in self.handles)
        )
        return may_heal and self.replica_world_size > 1 and self.without_upstream

    @cached_property
    def without_upstream(self) -> bool:
        """Whether no group is upstream's: those do not announce that they wait for heals."""
        return len(self.handles) == self.replica_world_size and all_announce(self.handles, HEALS)

    @cached_property
    def why_recomputed(self) -> Optional[str]:
        """Why the kept gradients of a failed step cannot be used; None if they are reduced again."""
        if self.replay:
            return None
        if self.heal:
            return f"others are ahead, at step {self.max_step}, and this group takes over their state"
        if not self.up_to_date:
            return f"others are ahead, at step {self.max_step}"
        return (
            "not all groups replay steps (replay_failed_step), or this is the first step of a job (init_sync)"
        )

    @cached_property
    def snapshot_steps(self) -> int:
        """Steps between two copies in all groups of a quorum: the most that one announces; 0: none does."""
        told = (announced(handle, SNAPSHOTS) for handle in self.handles)
        return max((int(each) for each in told if each.isdecimal()), default=0)

    @cached_property
    def gives_parts(self) -> bool:
        """Whether the assigned source may offer its state in parts, as far as its handle shows."""
        if self.source is None or self.source.replica_rank >= len(self.handles):
            return True
        handle = self.handles[self.source.replica_rank]
        return not announced(handle, HEALS) or bool(announced(handle, IN_PASSING))


@dataclass(frozen=True)
class HealSource:
    """A group that serves its state to a healing group."""

    replica_rank: int
    manager_address: str
    replica_id: str  # empty: the quorum does not name it


def make_plan(
    result: QuorumResult,
    *,
    use_async_quorum: bool,
    allow_heal: bool,
    world_size_mode: WorldSizeMode,
    min_replica_size: int,
    heal_first: bool = False,
) -> Plan:
    """Computes the plan of one rank from a quorum.

    If heals run in the background (asynchronous quorum), or are not allowed, only the groups at max_step
    participate. With a synchronous quorum a group has healed before the step begins, so all participate,
    unless all groups announce that they heal in passing, and go on without it: then it may train along, with
    weight 0. ``heal_first`` makes step 0 synchronous in any case: all groups but one may heal there, and they
    participate too.
    """
    in_background = use_async_quorum and not (heal_first and result.max_step == 0)
    only_up_to_date = in_background or not allow_heal or _heals_in_passing(result, min_replica_size)
    rank = result.max_replica_rank if only_up_to_date else result.replica_rank
    participants = result.max_world_size if only_up_to_date else result.replica_world_size
    speeds = result.max_speeds if only_up_to_date else result.speeds
    if world_size_mode is WorldSizeMode.FIXED_WITH_SPARES:
        participants = min(participants, min_replica_size)
        if rank is not None and rank >= min_replica_size:
            rank = None
    source = None
    if allow_heal and result.heal and result.recover_src_replica_rank is not None:
        source_rank, ids = result.recover_src_replica_rank, result.replica_ids
        source_id = ids[source_rank] if source_rank < len(ids) else ""
        source = HealSource(source_rank, result.recover_src_manager_address, source_id)
    return Plan(
        quorum_id=result.quorum_id,
        replica_rank=result.replica_rank,
        replica_world_size=result.replica_world_size,
        replica_ids=result.replica_ids,
        store_address=result.store_address,
        handles=result.reconfigure_handles,
        without_handles=result.replicas_without_handles,
        max_step=result.max_step,
        committed_quorum_id=result.committed_quorum_id,
        participating_rank=rank,
        participants=participants,
        speeds=tuple(speeds[:participants]),
        skipped=tuple(result.skipped),
        num_up_to_date=result.max_world_size,
        up_to_date=result.max_replica_rank is not None,
        replay=result.replay,
        source=source,
        additional_sources=result.additional_source_addresses if source is not None else [],
        recover_dst=result.recover_dst_replica_ranks if allow_heal else [],
        help_dst=result.help_dst_replica_ranks if allow_heal else [],
        draining=result.draining,
        in_background=in_background,
        leads=result.max_replica_rank == 0,
    )


def _heals_in_passing(result: QuorumResult, min_replica_size: int) -> bool:
    """Whether a group that is behind may train along. The same in all ranks of all groups."""
    handles = result.reconfigure_handles
    modes = {announced(handle, IN_PASSING) for handle in handles}
    if result.max_step == 0 or len(handles) != result.replica_world_size or not all(modes):
        return False
    # With "auto" it heals at once from the only group that has the state.
    return result.max_world_size >= max(min_replica_size, 2 if "auto" in modes else 1)


class Planner:
    """Computes plans of one rank. While nothing changes, successive rounds return the same result object; the
    planner then returns the same plan.

    Args: the same as those of :func:`make_plan`.

    Attributes:
        use_async_quorum: the argument of that name.
        heal_first: the argument of that name; set before the first quorum.
        has_spares: whether groups may be spares.
    """

    heal_first = False

    def __init__(self, use_async_quorum: bool, world_size_mode: WorldSizeMode, min_replica_size: int) -> None:
        self.use_async_quorum = use_async_quorum
        self.has_spares = world_size_mode is WorldSizeMode.FIXED_WITH_SPARES
        self._make = partial(make_plan, world_size_mode=world_size_mode, min_replica_size=min_replica_size)
        self._last: Optional[tuple[QuorumResult, tuple[bool, bool], Plan]] = None

    def plan(self, result: QuorumResult, allow_heal: bool) -> Plan:
        """Returns this rank's plan for a quorum."""
        last, how = self._last, (allow_heal, self.use_async_quorum)
        if last is not None and last[0] is result and last[1] == how:
            return last[2]
        use_async_quorum, heal_first = self.use_async_quorum, self.heal_first
        plan = self._make(
            result, use_async_quorum=use_async_quorum, allow_heal=allow_heal, heal_first=heal_first
        )
        self._last = (result, how, plan)
        return plan
