"""A job of steps of a tenth of a second. It prints its steps, and how many groups took part in each."""

from __future__ import annotations

import os
import sys
import time

import torch
from torch.utils.data import TensorDataset

import torchft

STEPS = int(sys.argv[1])
BEHIND = sys.argv[2:]  # the groups whose script fails behind its loop


def main() -> None:
    torch.set_num_threads(1)
    job = torchft.Job(device="cpu")
    net = torch.nn.Linear(8, 1)
    model, _ = job.prepare(net, torch.optim.SGD(net.parameters(), lr=1e-3))
    data = TensorDataset(torch.ones(64, 8))
    loader = job.loader(data, global_batch_size=16, micro_batch_size=1, epochs=-(-STEPS // 4))
    print(f"{job.name} starts", flush=True)
    for step in loader:
        for (rows,) in step:
            step.backward(model(rows).square().mean())
        time.sleep(0.1)
        if step.commit():
            print(f"{job.name} step {job.step} groups {step.participants}", flush=True)
    print(f"{job.name} ended at step {job.step}", flush=True)
    if os.environ["REPLICA_GROUP_ID"] in BEHIND:
        raise RuntimeError("the result cannot be written")


main()
