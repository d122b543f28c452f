"""The scheduling policies of a worker's threads."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
import torch
from torch.distributed import ReduceOp, TCPStore

from tests.unit.process_group.isolated.processes import workers
from tests.unit.process_group.ranks import TIMEOUT, connect, on_ranks
from torchft.process_group import ProcessGroupBabyGloo
from torchft.process_group._gloo.scheduling import _LOOP


def policies_of_workers() -> dict[str, set[int]]:
    """The policies of the workers' threads with each name."""
    policies: dict[str, set[int]] = {}
    for worker in workers():
        for thread in Path(f"/proc/{worker}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
                name = (thread / "comm").read_text().strip()
                policies.setdefault(name, set()).add(os.sched_getscheduler(int(thread.name)))
    return policies


def test_only_gloos_event_loop_does_not_preempt(store: TCPStore) -> None:
    # Two ranks, so that the event loops run while the peers connect: a thread sets its name when it first
    # runs.
    groups = [ProcessGroupBabyGloo(TIMEOUT, standby=False) for _ in range(2)]
    policies: dict[str, set[int]] = {}
    try:
        # A worker waits only 0.1 s for the name. It sets the policies of all loops again when the group
        # reconnects.
        for _ in range(10):
            connect(groups, store)
            on_ranks(2, lambda rank: groups[rank].allreduce([torch.ones(1)], ReduceOp.SUM).wait())
            policies = policies_of_workers()
            if policies.get(_LOOP) in (None, {os.SCHED_BATCH}):
                break
    finally:
        for group in groups:
            group.shutdown()
    if _LOOP not in policies:
        pytest.skip(f"this PyTorch does not name Gloo's thread: {sorted(policies)}")
    assert policies.pop(_LOOP) == {os.SCHED_BATCH}
    assert set().union(*policies.values()) == {os.SCHED_OTHER}
