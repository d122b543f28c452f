"""A rank that holds a stage of a pipeline, saves two checkpoints, and resumes. Arguments: their folder,
and one in which rank 0 looks, with the first of them only.
"""

import os
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.utils.data import TensorDataset

import torchft
from torchft.checkpointing.snapshots.due import Due

folder, of_rank_0 = map(Path, sys.argv[1:])
rank = int(os.environ["RANK"])
job = torchft.Job(device="cpu", checkpoint_dir=folder)
net = nn.Sequential(nn.Linear(1, 1, bias=False))  # each stage names its parameter "0.weight"
job.prepare(PipelineStage(net, rank, 2, job.device), torch.optim.Adam(net.parameters()))
job.loader(
    TensorDataset(torch.zeros(4, 1)), global_batch_size=4, micro_batch_size=4, data_rank=0, data_world_size=1
)
for step in (1, 2):
    nn.init.constant_(net[0].weight, 10.0 * step + rank)
    job._checkpoints._write(step, Due(str(folder), 1, 0, 1, "k"), job._checkpoint())
    dist.barrier()
if rank == 0:  # as if the second one appeared while the ranks look
    shutil.copytree(folder / "step-1", of_rank_0 / "step-1")
    job._checkpoints._folder = of_rank_0
dist.barrier()
job._checkpoints.resume(job._checkpoint, job._resume)
print(f"rank {rank} weight {net[0].weight.item()}", flush=True)
job.shutdown()
