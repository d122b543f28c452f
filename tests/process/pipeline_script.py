"""A group of two ranks, each with a stage of a pipeline. The last argument is the number of epochs."""

import hashlib
import os
import sys
import time

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.utils.data import TensorDataset

import torchft

PARTS = 2  # of a batch, in the schedule

torch.manual_seed(0)
torch.set_num_threads(1)
job = torchft.Job(device="cpu")
rank = int(os.environ["RANK"])
stages = [nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Linear(8, 1)]
stage = PipelineStage(stages[rank], rank, 2, job.device)
job.prepare(stage, torch.optim.Adam(stages[rank].parameters(), lr=0.01))
inputs = torch.randn(64, 4)
dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
weight = 1.0
schedule = ScheduleGPipe(
    stage,
    n_microbatches=PARTS,
    loss_fn=lambda made, wanted: (made - wanted).square().mean() * weight / PARTS,
    scale_grads=False,  # it would divide the gradients of the batches before as well
)
data = job.loader(
    dataset,
    global_batch_size=16,
    micro_batch_size=4,
    epochs=int(sys.argv[-1]),
    data_rank=0,  # both ranks work on the same samples
    data_world_size=1,
)
for step in data:
    for x, y in step:
        weight, losses = step.weight, []
        if rank == 0:
            schedule.step(x)
            step.ran()
        else:
            schedule.step(target=y, losses=losses)
            step.ran(torch.stack(losses).sum())
    norm = step.clip(1.0)
    if step.commit():
        print(f"step {job.step} norm {norm:.6f} loss {step.loss:.6f}", flush=True)
    time.sleep(0.02)
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in stages[rank].parameters()))
print(f"rank {rank} step {job.step} weights {digest.hexdigest()}", flush=True)
