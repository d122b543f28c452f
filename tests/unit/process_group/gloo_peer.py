"""Rank 1 of two: joins one allreduce, and no later one. It ends with the test."""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
from torch.distributed import ReduceOp

from torchft.process_group import ProcessGroupGloo

if __name__ == "__main__":
    group = ProcessGroupGloo(timeout=timedelta(seconds=30))
    group.configure(sys.argv[1], "peer", 1, 2)
    group.allreduce([torch.ones(1)], ReduceOp.SUM).wait()
    print('{"event": "took part"}', flush=True)
    sys.stdin.read()
