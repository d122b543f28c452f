"""A rank of a group without a Manager. On command it does a step: a quorum and a vote."""

from __future__ import annotations

import json
import socket
import sys
import time
from datetime import timedelta

from torchft._manager.group import join_group
from torchft._manager.settings import resolve
from torchft._torchft import ManagerClient, ManagerServer

TIMEOUT = timedelta(seconds=60)


def main() -> None:
    settings = resolve(
        rank=None,
        world_size=None,
        store_addr=None,
        store_port=None,
        lighthouse_addr=None,
        port=None,
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT,
        connect_timeout=TIMEOUT,
        heartbeat_interval=timedelta(seconds=1),
        quorum_retries=0,
    )
    group = join_group(settings, "group", socket.gethostname(), ManagerServer)
    client = group.connect(settings, socket.gethostname(), ManagerClient)
    print(json.dumps({"event": "connected", "manager": group.manager_address}), flush=True)
    for line in sys.stdin:
        step = json.loads(line)["step"]
        while not attempt(client, settings.group_rank, step):
            time.sleep(0.05)  # a rank of the group has failed; when it returns, it must request the quorum first


def attempt(client: ManagerClient, rank: int, step: int) -> bool:
    try:
        client._quorum(rank, step, f"rank {rank}", False, TIMEOUT, 0)
        committed = client.should_commit(rank, step, True, TIMEOUT)
    except RuntimeError as error:
        print(json.dumps({"event": "failed", "step": step, "error": str(error)}), flush=True)
        return False
    print(json.dumps({"event": "step", "step": step, "committed": committed}), flush=True)
    return True


if __name__ == "__main__":
    main()
