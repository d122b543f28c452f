"""A script of `torchft run` that tells in files what it does. Group 1 stays behind its loop, to be killed;
with an argument, each group raises there.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import torchft

STEPS = 8


def main() -> None:
    folder, group = Path.cwd(), os.environ["REPLICA_GROUP_ID"]
    life = len(list(folder.glob(f"life-{group}-*")))
    (folder / f"life-{group}-{life}").touch()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    job = torchft.Job(device="cpu", snapshots=0)
    model, _ = job.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    data = TensorDataset(torch.randn(4 * STEPS, 4))
    for step in job.loader(data, global_batch_size=4, micro_batch_size=2):
        for (x,) in step:
            step.backward(model(x).square().mean())
        if step.commit():
            (folder / f"step-{group}-{life}").touch()
    if sys.argv[1:]:
        raise OSError(f"{sys.argv[1]}: no space left on device")
    (folder / f"pid-{group}").write_text(f"{os.getpid()}\n")  # it saves the model, say
    if group == "1":
        time.sleep(600)


if __name__ == "__main__":
    main()
