"""A source of 64 MB that gives them slowly, until it is killed."""

from __future__ import annotations

import sys
from datetime import timedelta

import torch

from torchft.checkpointing import HTTPTransport

transport: HTTPTransport[dict[str, torch.Tensor]] = HTTPTransport(timedelta(seconds=60), 0, bandwidth_limit=8 << 20)
transport.send_checkpoint([1], 1, {"w": torch.ones(16 << 20)}, timedelta(seconds=60))
print(transport.metadata(), flush=True)
sys.stdin.read()
