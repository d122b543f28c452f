"""One rank of a group that SIGTERM drains, with a DataLoader worker.

It writes an event per step: its number, whether it was committed, the batch, and the samples that this rank
counts. HANG_AT is a step at which the last rank of the group hangs outside of Python.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

from torchft import DistributedDataParallel, Manager, Optimizer
from torchft.data import ElasticDataLoader
from torchft.process_group import ProcessGroupGloo

SAMPLES, BATCH = 600, 12


class Samples(Dataset):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index / SAMPLES])


def main() -> None:
    group, rank = os.environ["REPLICA_GROUP_ID"], int(os.environ["RANK"])
    events = Path(os.environ["EVENTS"]) / f"{group}-{rank}.jsonl"

    def write(event: str, **fields: Any) -> None:
        with events.open("a") as file:
            file.write(json.dumps({"event": event, "step": manager.current_step(), **fields}) + "\n")

    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    net = nn.Linear(1, 1)
    sgd = torch.optim.SGD(net.parameters(), lr=1e-3)
    pg = ProcessGroupGloo(timeout=timedelta(seconds=60))
    manager = Manager(
        pg,
        state_dict=lambda: {"net": net.state_dict()},
        load_state_dict=lambda state: net.load_state_dict(state["net"]),
        min_replica_size=1,
        replica_id=f"group_{group}",
    )
    if "TORCHFT_LEAVE_ON" not in os.environ:  # under `torchft run` this call is not needed
        manager.leave_on(signal.SIGTERM)
    model, optimizer = DistributedDataParallel(manager, net), Optimizer(manager, sgd)
    loader = ElasticDataLoader(
        manager,
        Samples(),
        global_batch_size=BATCH,
        micro_batch_size=1,
        epochs=10**6,
        num_workers=1,
        multiprocessing_context="fork",
    )
    write("start", pid=os.getpid())
    for step in loader:
        optimizer.zero_grad()
        counted: list[int] = []
        for unit in step:
            with unit.accumulate(model):
                (model(unit.data).square().mean() * unit.weight).backward()
            counted += unit.indices if unit.weight else []
        number = manager.current_step()
        if str(number) == os.environ.get("HANG_AT") and rank == dist.get_world_size() - 1:
            write("hangs")
            libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
            libc.pthread_mutex_lock(mutex)
            libc.pthread_mutex_lock(mutex)
        optimizer.step()
        position = step.position
        committed = manager.current_step() > number
        write("commit" if committed else "lost", batch=[position.epoch, position.batch], counted=counted)
    dist.barrier()
    manager.shutdown()
    write("left", draining=manager.draining())
    pg.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
