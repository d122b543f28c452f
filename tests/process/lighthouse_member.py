"""A replica group that asks and votes until its parent ends it, and tells of each step: without PyTorch."""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta

from events import emit

from torchft.coordination import ManagerClient, ManagerServer

TIMEOUT = timedelta(seconds=60)

server = ManagerServer(
    replica_id=f"member_{os.environ['REPLICA_GROUP_ID']}:{uuid.uuid4()}",
    lighthouse_addr=os.environ["TORCHFT_LIGHTHOUSE"],
    hostname="localhost",
    bind="127.0.0.1:0",
    store_addr="localhost:1",
    world_size=1,
    heartbeat_interval=timedelta(milliseconds=100),
    connect_timeout=TIMEOUT,
    quorum_retries=0,
)
client = ManagerClient(server.address(), connect_timeout=TIMEOUT)
step = 0
while True:
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
    emit("step", step=step, quorum_id=quorum.quorum_id, members=quorum.replica_world_size)
    time.sleep(0.02)
