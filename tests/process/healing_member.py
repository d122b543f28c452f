"""A replica group of one rank with a Manager and weights, which it serves slowly.

    healing_member.py MEGABYTES MEGABYTES_A_SECOND

It trains until its parent ends it, or until it is drained. SIGUSR1 ends it in a step, after the quorum.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from typing import Any

import torch
from events import Commands
from torch.distributed import TCPStore

from torchft.checkpointing import HTTPTransport
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

TIMEOUT = timedelta(seconds=60)


def main(megabytes: int, megabytes_a_second: int) -> None:
    Commands()  # for its side effect: this process ends with its parent
    torch.set_num_threads(1)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    weights = torch.zeros(megabytes * 250_000)
    transport: HTTPTransport[dict[str, Any]] = HTTPTransport(
        TIMEOUT, 0, bandwidth_limit=megabytes_a_second * 1_000_000
    )
    pg = ProcessGroupGloo(timeout=TIMEOUT)
    manager = Manager(
        pg,
        load_state_dict=lambda state: weights.copy_(state["weights"]),
        state_dict=lambda: {"weights": weights},
        min_replica_size=1,
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT,
        connect_timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        replica_id=f"group_{os.environ['REPLICA_GROUP_ID']}",
        checkpoint_transport=transport,
    )
    signals: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: signals.append(number))
    while not manager.draining():
        manager.start_quorum()
        if signals:
            manager.wait_quorum()
            os._exit(9)
        time.sleep(0.05)
        gradient = torch.ones(1000)
        manager.allreduce(gradient).wait()
        if manager.should_commit():
            weights[:1000] -= gradient
    manager.shutdown()
    pg.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
