"""A replica group that asks and votes, and does nothing else: without PyTorch, so that it starts at once."""

from __future__ import annotations

import os
import sys
import time
import uuid
from datetime import timedelta

from torchft.coordination import ManagerClient, ManagerServer

TIMEOUT = timedelta(seconds=30)


def main(steps: int) -> None:
    server = ManagerServer(
        replica_id=f"member_{os.environ['REPLICA_GROUP_ID']}:{uuid.uuid4()}",
        lighthouse_addr=os.environ["TORCHFT_LIGHTHOUSE"],
        hostname="localhost",
        bind=f"127.0.0.1:{os.environ['TORCHFT_MANAGER_PORT']}",
        store_addr="localhost:1",
        world_size=1,
        heartbeat_interval=timedelta(milliseconds=100),
        connect_timeout=TIMEOUT,
        quorum_retries=0,
    )
    client = ManagerClient(server.address(), connect_timeout=TIMEOUT)
    print("ready", flush=True)
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
        )
        step = max(step, quorum.max_step) + 1
        client.should_commit(0, step, True, timeout=TIMEOUT)
        time.sleep(0.02)
    server.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]))
