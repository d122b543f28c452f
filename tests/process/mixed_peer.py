"""One rank of a process group of the torchft on PYTHONPATH, which gets new peers by commands on stdin.

One operation at a time, because upstream's isolated group confuses concurrent ones (KeyError from its wait).
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta

import torch
from events import emit
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import AllgatherOptions, BroadcastOptions

import torchft
from torchft import process_group

TIMEOUT = timedelta(seconds=30)

if __name__ == "__main__":  # upstream's worker imports this file again
    torch.set_num_threads(1)
    group = getattr(process_group, sys.argv[1])(timeout=TIMEOUT)
    emit("made", torchft=os.path.dirname(torchft.__file__))
    for line in sys.stdin:
        command = json.loads(line)
        if command["where"] is None:
            break
        rank, n = command["rank"], command["n"]
        process_group.reconfigure_with_store(group, command["where"], rank, n, TIMEOUT)

        total = torch.full((4,), rank + 1.0)
        group.allreduce([total], ReduceOp.SUM).wait()
        large = torch.full((100_000,), rank + 1.0)
        group.allreduce([large], ReduceOp.SUM).wait()
        assert large.eq(total[0]).all()
        gathered = [torch.zeros(2) for _ in range(n)]
        group.allgather([gathered], [torch.full((2,), float(rank))], AllgatherOptions()).wait()
        sent, opts = torch.full((3,), float(rank)), BroadcastOptions()
        opts.rootRank = n - 1
        group.broadcast([sent], opts).wait()
        emit(
            "done",
            quorum=command["quorum"],
            sum=total[0].item(),
            gathered=[part[0].item() for part in gathered],
            sent=sent[0].item(),
        )
    group.shutdown()
