"""A training script in the style of upstream's README. It runs with any torchft.

`torchrun --nproc_per_node 1 readme_script.py` is one replica group.
"""

import hashlib
import json
import logging
import os
from datetime import timedelta

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

from torchft import (
    DistributedDataParallel,
    DistributedSampler,
    Manager,
    Optimizer,
    ProcessGroupGloo,
    ProcessGroupNCCL,
)

logging.basicConfig(level=logging.INFO)

STEPS = 12


def main():
    replica_group_id = int(os.environ.get("REPLICA_GROUP_ID", 0))
    num_replica_groups = int(os.environ.get("NUM_REPLICA_GROUPS", 2))

    device = "cuda" if torch.cuda.is_available() else "cpu"
    pg = (
        ProcessGroupNCCL(timeout=timedelta(seconds=30))
        if torch.cuda.is_available()
        else ProcessGroupGloo(timeout=timedelta(seconds=30))
    )

    torch.manual_seed(replica_group_id)
    features = torch.randn(256, 20, generator=torch.Generator().manual_seed(7))
    labels = features[:, :3].argmax(dim=1)
    dataset = TensorDataset(features, labels)
    sampler = DistributedSampler(
        dataset,
        replica_rank=replica_group_id,
        num_replica_groups=num_replica_groups,
        group_rank=0,
        num_replicas=1,
        shuffle=True,
    )
    loader = DataLoader(dataset, batch_size=16, sampler=sampler)

    def load_state_dict(state_dict):
        m.load_state_dict(state_dict["model"])
        optimizer.load_state_dict(state_dict["optim"])

    def state_dict():
        return {"model": m.state_dict(), "optim": optimizer.state_dict()}

    manager = Manager(
        pg=pg,
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        replica_id=f"train_{replica_group_id}",
        timeout=timedelta(seconds=30),
    )

    m = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 3)).to(device)
    m = DistributedDataParallel(manager, m)
    optimizer = Optimizer(manager, optim.AdamW(m.parameters(), lr=1e-2))

    while manager.current_step() < STEPS:
        sampler.set_epoch(manager.current_step())
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(m(inputs.to(device)), targets.to(device))
            loss.backward()
            optimizer.step()
            if manager.current_step() >= STEPS:
                break

    weights = torch.cat([p.detach().flatten().cpu() for p in m.parameters()])
    result = {
        "event": "result",
        "group": replica_group_id,
        "manager": manager.state_dict(),
        "participants": manager.num_participants(),
        "norm": weights.norm().item(),
        "digest": hashlib.sha256(weights.numpy().tobytes()).hexdigest(),
    }
    print(json.dumps(result), flush=True)
    manager.shutdown()


if __name__ == "__main__":
    main()
