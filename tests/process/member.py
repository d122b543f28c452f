"""A replica group that only requests quorums and votes. Without PyTorch, so that it starts at once.

    member.py [STEPS]

It runs the torchft on PYTHONPATH, and reports each step. Without STEPS it continues until its parent ends it.
"""

from __future__ import annotations

import inspect
import os
import sys
import time
import uuid
from datetime import timedelta
from typing import Any

from events import emit

from torchft.coordination import ManagerClient, ManagerServer

TIMEOUT = timedelta(seconds=60)
# An upstream nightly requires a handle, and release 0.2.0 does not know handles.
TAKES_HANDLE = "reconfigure_handle" in inspect.signature(ManagerClient._quorum).parameters
HANDLE: dict[str, Any] = {"reconfigure_handle": ""} if TAKES_HANDLE else {}


def main(steps: float) -> None:
    server = ManagerServer(
        replica_id=f"member_{os.environ['REPLICA_GROUP_ID']}:{uuid.uuid4()}",
        lighthouse_addr=os.environ["TORCHFT_LIGHTHOUSE"],
        hostname="localhost",
        bind=f"127.0.0.1:{os.environ.get('TORCHFT_MANAGER_PORT', '0')}",
        store_addr="localhost:1",
        world_size=1,
        heartbeat_interval=timedelta(milliseconds=100),
        connect_timeout=TIMEOUT,
        quorum_retries=0,
    )
    client = ManagerClient(server.address(), connect_timeout=TIMEOUT)
    step = 0
    while step < steps:
        quorum = client._quorum(
            group_rank=0,
            step=step,
            checkpoint_metadata="",
            shrink_only=False,
            init_sync=True,
            commit_failures=0,
            timeout=TIMEOUT,
            **HANDLE,
        )
        step = max(step, quorum.max_step) + 1
        committed = client.should_commit(0, step, True, timeout=TIMEOUT)
        emit(
            "step",
            step=step,
            quorum_id=quorum.quorum_id,
            members=quorum.replica_world_size,
            committed=committed,
        )
        if getattr(quorum, "draining", False):  # an upstream result does not have this field
            client._leave(TIMEOUT)
            break
        time.sleep(0.02)
    server.shutdown()


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else float("inf"))
