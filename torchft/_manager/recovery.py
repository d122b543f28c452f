"""Healing, seen from the group that heals."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Callable

from torchft._manager.plan import Plan

if TYPE_CHECKING:
    from torchft._torchft import ManagerClient
    from torchft.checkpointing.transport import CheckpointTransport


def fetch_state(
    plan: Plan,
    *,
    group_rank: int,
    transport: CheckpointTransport[dict[str, Any]],
    connect: Callable[[str], ManagerClient],
    timeout: timedelta,
) -> dict[str, Any]:
    """Fetches the state of ``plan.max_step`` from this rank's counterpart in the assigned group.

    Args:
        plan: of a group that heals.
        group_rank: which rank of the source serves this one.
        transport: moves the bytes.
        connect: opens a client to a manager server.
        timeout: for asking where the state is, and again for fetching it.

    Returns:
        ``{"user": {key: value}, "torchft": {"step": int, "batches_committed": int}}``.

    Raises:
        RuntimeError: the source cannot be reached, or serves another step than it was asked for.
        TimeoutError: it took longer than the timeout.
    """
    source = plan.sources[0]
    # Only needed for this one question; it closes when it is dropped.
    metadata = connect(source.manager_address)._checkpoint_metadata(group_rank, timeout=timeout)
    state = transport.recv_checkpoint(
        src_rank=source.replica_rank, metadata=metadata, step=plan.max_step, timeout=timeout
    )
    served = state["torchft"]["step"]
    if served != plan.max_step:
        raise RuntimeError(f"{source.manager_address} served the state of step {served} instead of {plan.max_step}")
    return state
