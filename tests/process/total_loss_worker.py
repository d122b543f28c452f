"""A rank of a job that trains with FSDP2 and a loader, and is killed with all others. It writes an event for
each step: its number, and the samples that this rank counted. The weights at the end depend on all that goes
on after a kill: the optimizer, the scheduler, the masks of the dropout, and the data's random numbers.
"""

from __future__ import annotations

import hashlib
import os
import random
import time

import numpy
import torch
from events import emit
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset

import torchft

SAMPLES, BATCH = 160, 16


class Samples(Dataset):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        noise = 0.1 * random.random() + 0.1 * numpy.random.random() + 0.1 * torch.rand(8)
        return torch.randn(8, generator=generator) + noise, index


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    width = int(os.environ.get("WIDTH", "16"))
    net = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Dropout(0.2), nn.Linear(width, 2))
    job = torchft.Job(
        device="cpu",
        reproducible=True,
        snapshots="auto" if os.environ["SNAPSHOTS"] == "auto" else int(os.environ["SNAPSHOTS"]),
        checkpoint_dir=os.environ.get("CHECKPOINTS"),
        checkpoint_every=5,
    )
    fully_shard(net, mesh=job.mesh)
    adam = torch.optim.AdamW(net.parameters(), lr=0.01)
    model, _, _ = job.prepare(net, adam, torch.optim.lr_scheduler.StepLR(adam, 7, 0.5))
    loader = job.loader(
        Samples(), global_batch_size=BATCH, micro_batch_size=2, epochs=int(os.environ["EPOCHS"])
    )
    emit("ready")
    for step in loader:
        counted: set[int] = set()  # in the first step all batches come twice, to find a scale
        for x, index in step:
            if step.weight:
                counted.update(index.tolist())
            step.backward(model(x).square().mean())
        number = job.step
        if step.commit():
            emit("step", step=number, counted=sorted(counted))
        time.sleep(float(os.environ["STEP_S"]))
    digest = hashlib.sha256()
    for parameter in net.parameters():
        assert isinstance(parameter, DTensor)
        digest.update(parameter.full_tensor().detach().numpy().tobytes())
    emit("finished", weights=digest.hexdigest())


if __name__ == "__main__":
    main()
