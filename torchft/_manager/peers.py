"""Which process groups can meet the peers of a quorum, and how if one of them runs torchft 0.2.0."""

from __future__ import annotations

import torch.distributed as dist

from torchft._manager.plan import Plan
from torchft._manager.settings import Settings, global_rank
from torchft.process_group.reconfigure import supports_reconfigure


def check_process_group(pg: dist.ProcessGroup) -> None:
    """Raises ValueError unless a process group can be rebuilt for other peers."""
    if not supports_reconfigure(pg):
        raise ValueError(
            f"pg={type(pg).__name__}: this process group does not support reconfiguration, so it cannot outlive "
            "the loss of a peer; use one of torchft.process_group, or make a native one with "
            "init_process_group(..., enable_reconfigure=True) (PyTorch >= 2.14)"
        )


def configure_by_store(pg: dist.ProcessGroup, plan: Plan, replica_id: str, settings: Settings) -> None:
    """Rebuilds a process group as torchft 0.2.0 does: peers meet in the primary's store.

    Raises:
        RuntimeError: this kind of group needs reconfigure handles, and somebody in the quorum sent none.
        Exception: whatever the group's ``configure`` raises.
    """
    group_rank, group_world_size = settings.group_rank, settings.group_world_size
    configure = getattr(pg, "configure", None)
    if configure is None:
        if replica_id in plan.without_handles:
            who = f"the lighthouse at {settings.lighthouse_addr} does not pass them on"
        else:
            who = f"missing are those of {plan.without_handles or plan.replica_ids}"
        raise RuntimeError(
            f"{type(pg).__name__} can only be rebuilt from reconfigure handles, and quorum "
            f"{plan.quorum_id} came without: {who} (torchft 0.2.0 has none)"
        )
    configure(
        f"{plan.store_address}/torchft/{plan.quorum_id}/{group_rank}",
        replica_id,
        plan.replica_rank,
        plan.replica_world_size,
        quorum_id=plan.quorum_id,
        group_rank=group_rank,
        group_world_size=group_world_size,
        global_ranks=[global_rank(i, group_rank, group_world_size) for i in plan.replica_ids],
    )
