"""A worker of torchrun that records its round, and runs until a command ends it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

folder = Path(os.environ["EVENTS"])
dist.init_process_group("gloo")
event = {
    "node": os.environ["NODE"],
    "rank": dist.get_rank(),
    "size": dist.get_world_size(),
    "pid": os.getpid(),
}
with (folder / "events.jsonl").open("a") as events:
    events.write(json.dumps(event) + "\n")
while True:
    end = torch.tensor([float((folder / "end").exists())])
    dist.all_reduce(end)
    if end.item():
        break
    time.sleep(0.05)  # the duration of a step
dist.destroy_process_group()
