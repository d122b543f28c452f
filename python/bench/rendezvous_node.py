"""A node for rendezvous.py, without workers. Each line on stdin simulates a failure of its workers."""

from __future__ import annotations

import json
import sys
import threading
import time

from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry

from torchft.dlrover.torchrun import get_handler

# torchrun's default monitor interval
_MONITOR_S = 0.1


def main(backend: str, endpoint: str, nodes: int, conf: dict[str, object]) -> None:
    failed = threading.Event()

    def listen() -> None:
        for _ in sys.stdin:
            failed.set()

    threading.Thread(target=listen, daemon=True).start()
    create = get_handler() if backend == "torchft" else rendezvous_handler_registry.create_handler
    handler = create(
        RendezvousParameters(backend, endpoint, "bench", 1, nodes, local_addr="127.0.0.1", **conf)
    )
    while True:
        asked = time.time()
        info = handler.next_rendezvous()
        failed.clear()
        record = {
            "event": "round",
            "asked": asked,
            "began": time.time(),
            "size": info.world_size,
            "rank": info.rank,
        }
        print(json.dumps(record), flush=True)
        while not failed.is_set() and not handler.num_nodes_waiting():
            time.sleep(_MONITOR_S)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4]))
