"""Quorums and a peer's state for a Manager under test."""

from __future__ import annotations

from typing import Any, Callable

Quorum = Callable[..., Any]


def healing(make_quorum: Quorum, step: int = 20, **fields: Any) -> Any:
    """Makes a quorum in which this group is behind."""
    return make_quorum(
        max_step=step,
        max_replica_rank=None,
        max_world_size=1,
        heal=True,
        recover_src_replica_rank=0,
        recover_src_manager_address="http://source:1",
        **fields,
    )


def peer_state(step: int = 20, user: Any = None) -> dict[str, Any]:
    return {
        "user": {"default": "weights"} if user is None else user,
        "torchft": {"step": step, "batches_committed": 40},
    }


def manager_state(step: int, batches: int) -> dict[str, Any]:
    return {"user": {"default": {"weights": 1}}, "torchft": {"step": step, "batches_committed": batches}}
