"""A target without memory for the state of step 1, and then with enough memory. Prints the result of each
attempt.
"""

from __future__ import annotations

import resource
import sys
from datetime import timedelta
from pathlib import Path

import torch

from torchft.checkpointing import HTTPTransport
from torchft.checkpointing.transport import CheckpointError

TIMEOUT = timedelta(seconds=60)
# Bytes beyond the present size of the process: enough for thread stacks, too few for the state.
ROOM = 256 << 20

transport: HTTPTransport[dict[str, torch.Tensor]] = HTTPTransport(TIMEOUT, 0)
# a warm-up: the first transfer starts threads and loads libraries
transport.send_checkpoint([1], 0, {"w": torch.ones(3)}, TIMEOUT)
transport.recv_checkpoint(0, transport.metadata(), 0, TIMEOUT)

size = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmSize:"))
_, hard = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, ((int(size.split()[1]) << 10) + ROOM, hard))
metadata = sys.argv[1]
try:
    transport.recv_checkpoint(0, metadata, 1, TIMEOUT)
    print("received", flush=True)
except CheckpointError as error:
    print(error, flush=True)
resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
print(transport.recv_checkpoint(0, metadata, 1, TIMEOUT)["w"][-1].item(), flush=True)
transport.shutdown()
