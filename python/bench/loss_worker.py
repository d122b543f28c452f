"""A replica group of loss_picture.py, with the torchft on PYTHONPATH. The group is killed and restarted by
commands.

This process imports PyTorch and torchft, and forks a process for each incarnation of the group, so that a
restart is fast. Commands on stdin start an incarnation, kill it, and wait for its end. Each incarnation
reports its committed steps, with the number of samples so far; group 0 also its weights.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import importlib
import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "process"))

import torch
import torch.distributed as dist
from events import emit
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchft

GROUP, GROUPS, EPOCHS = (
    int(os.environ[name]) for name in ("REPLICA_GROUP_ID", "NUM_REPLICA_GROUPS", "EPOCHS")
)
OF_A_GROUP = 16  # samples per group and step
STEP_SEC = 0.05  # minimum duration of a step
TIMEOUT = timedelta(seconds=30)


def main() -> None:
    torch.set_num_threads(1)
    # Imported before the forks.
    digits: Any = load_digits()
    data = TensorDataset(torch.tensor(digits.data / 8 - 1), torch.tensor(digits.target))
    _ = torchft.Manager, torchft.ProcessGroupGloo, torchft.DistributedDataParallel, torchft.Optimizer
    # Otherwise imported late by DistributedDataParallel and optimizers.
    importlib.import_module("torch._dynamo")
    with contextlib.suppress(ImportError):  # upstream does not have it
        importlib.import_module("torchft.data.loader")
    emit("imported")
    child = 0
    for line in sys.stdin:  # read on this thread only, because a fork would copy a locked stdin
        command = json.loads(line)
        do = command["do"]
        if do == "start":
            child = os.fork()
            if child == 0:
                ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
                train(data, **command)
        elif do == "kill":
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            emit(do)
        elif do == "wait":
            emit(do, status=os.waitpid(child, 0)[1])


def train(data: TensorDataset, do: str, lighthouse: str, elastic: bool, go: str) -> None:
    """Train to the end of the job, beginning when the file `go` exists."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(store.port), RANK="0", WORLD_SIZE="1")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)).double()
    sgd = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)

    def load(state: dict[str, Any]) -> None:
        net.load_state_dict(state["net"])
        sgd.load_state_dict(state["sgd"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load,
        state_dict=lambda: {"net": net.state_dict(), "sgd": sgd.state_dict()},
        min_replica_size=1,
        lighthouse_addr=lighthouse,
        replica_id=f"loss_{GROUP}",
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT,
        connect_timeout=TIMEOUT,
    )
    model, optimizer = torchft.DistributedDataParallel(manager, net), torchft.Optimizer(manager, sgd)
    emit("manager")
    while not os.path.exists(go):
        time.sleep(0.01)
    train = _once if elastic else _in_shards
    began = time.monotonic()
    for samples, groups in train(manager, model, optimizer, data):
        flat = torch.cat([p.detach().flatten() for p in net.parameters()])
        weights = base64.b64encode(flat.numpy().tobytes()).decode() if GROUP == 0 else ""
        emit("step", step=manager.current_step(), samples=samples, groups=groups, weights=weights)
        time.sleep(max(0.0, STEP_SEC - (time.monotonic() - began)))
        began = time.monotonic()
    emit("ended")
    manager.shutdown()
    os._exit(0)


def _once(manager: Any, model: nn.Module, optimizer: Any, data: TensorDataset) -> Any:
    """Train with an ElasticDataLoader. Yield, per committed step, the samples so far and the participating
    groups.
    """
    from torchft.data import ElasticDataLoader

    loader = ElasticDataLoader(
        manager, data, global_batch_size=GROUPS * OF_A_GROUP, micro_batch_size=OF_A_GROUP, epochs=EPOCHS
    )
    for step in loader:
        optimizer.zero_grad()
        for unit in step:
            with unit.accumulate(model):
                (nn.functional.cross_entropy(model(unit.data[0]), unit.data[1]) * unit.weight).backward()
        before = loader.position
        optimizer.step()
        if loader.position != before:
            yield (
                loader.position.epoch * len(data) + loader.position.batch * GROUPS * OF_A_GROUP,
                step.participants,
            )


def _in_shards(manager: Any, model: nn.Module, optimizer: Any, data: TensorDataset) -> Any:
    """Train with a shard per group, like upstream's examples; the shard of a missing group is not read."""
    sampler = torchft.DistributedSampler(
        data, GROUP, GROUPS, group_rank=0, num_replicas=1, shuffle=True, seed=0
    )
    batches = _for_ever(DataLoader(data, OF_A_GROUP, sampler=sampler), sampler)
    samples = 0
    while samples < EPOCHS * len(data):
        optimizer.zero_grad()
        pixels, labels = next(batches)
        nn.functional.cross_entropy(model(pixels), labels).backward()
        before = manager.current_step()
        optimizer.step()
        samples = manager.batches_committed() * OF_A_GROUP
        if manager.current_step() > before:
            yield samples, manager.num_participants()


def _for_ever(loader: DataLoader[Any], sampler: Any) -> Any:
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


if __name__ == "__main__":
    main()
