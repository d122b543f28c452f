"""A node at torchrun's rendezvous that ends itself with SIGKILL: `rendezvous_node.py ENDPOINT NNODES
MOMENT`.
"""

from __future__ import annotations

import json
import os
import signal
import sys

from torch.distributed.elastic.rendezvous.api import RendezvousParameters

from torchft.dlrover import LighthouseRendezvousHandler

endpoint, nnodes, last = sys.argv[1], int(sys.argv[2]), sys.argv[3]
parameters = RendezvousParameters(
    "torchft", endpoint, "job/0", 1, nnodes, local_addr="127.0.0.1", last_call_timeout=2, join_timeout=100
)


def reached(moment: str) -> None:
    print(json.dumps({"event": moment}), flush=True)
    if moment == last:
        os.kill(os.getpid(), signal.SIGKILL)


handler = LighthouseRendezvousHandler.from_parameters(parameters)
reached("started")
service = handler._service
service.set_state()
reached("asked")
released = service.get_state(100)
assert released is not None
reached("released")
handler._meet(released)
reached("met")
