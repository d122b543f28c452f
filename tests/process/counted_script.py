"""A group of a torchft.Job whose weights count the samples: each time that sample i counts, weight i grows by
exactly 1/4. It is slow until the parent sends it a command.
"""

import time

import torch
from events import Commands, emit
from torch import nn
from torch.utils.data import TensorDataset

import torchft

commands, pause = Commands(), 0.05
torch.set_num_threads(1)
job = torchft.Job(device="cpu")
net = nn.Linear(64, 1, bias=False)
nn.init.zeros_(net.weight)
model, _ = job.prepare(net, torch.optim.SGD(net.parameters(), lr=1.0))
for step in job.loader(TensorDataset(torch.eye(64)), global_batch_size=4, micro_batch_size=1, epochs=50):
    for (x,) in step:
        step.backward(-model(x).mean())
    committed = step.commit()
    emit("step", step=job.step, committed=committed, members=step.participants)
    pause = pause if commands.poll() is None else 0.0
    time.sleep(pause)
emit("end", step=job.step, weights=net.weight.flatten().tolist())
