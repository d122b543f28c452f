"""A rank of a group in Kubernetes: prints the time of each commit as a JSON line.

group_script.py STEPS [FAIL_AT]: in step FAIL_AT each group raises the same exception.
"""

import json
import sys
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

import torchft

torch.set_num_threads(1)
steps, fail_at = int(sys.argv[1]), int((sys.argv[2:] or ["-1"])[0])
job = torchft.Job(device="cpu")
net = nn.Linear(64, 1, bias=False)
nn.init.zeros_(net.weight)
model, _ = job.prepare(net, torch.optim.SGD(net.parameters(), lr=0.01))
loader = job.loader(TensorDataset(torch.eye(64)), global_batch_size=8, micro_batch_size=1, epochs=steps // 8)
for step in loader:
    if job.step == fail_at:
        raise ValueError("a bad sample")
    for (x,) in step:
        step.backward(-model(x).mean())
    if step.commit():
        print(json.dumps({"time": time.time(), "step": job.step, "groups": step.participants}), flush=True)
    time.sleep(0.1)
print(json.dumps({"time": time.time(), "ended": job.step}), flush=True)
