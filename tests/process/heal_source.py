"""A source that serves 64 MB slowly, until it is killed."""

from __future__ import annotations

from datetime import timedelta

import torch
from events import Commands, emit

from torchft.checkpointing import HTTPTransport

commands = Commands()
transport: HTTPTransport[dict[str, torch.Tensor]] = HTTPTransport(
    timedelta(seconds=60), 0, bandwidth_limit=8 << 20
)
transport.send_checkpoint([1], 1, {"w": torch.ones(16 << 20)}, timedelta(seconds=60))
emit("serving", metadata=transport.metadata())
commands.next()
