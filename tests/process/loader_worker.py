"""One rank of a replica group that trains with an ElasticDataLoader, and kills itself (SIGKILL) on command.

Before the reduction of a step it writes a line into its log: the position, the quorum, and the samples that
it counts. Its state contains the quorum in which each step was committed. So the lines of steps in the final
weights can be distinguished from those of lost steps, and of steps committed only by a group that then
failed.

Commands: {"until": STEP} trains up to a step, or with {"fail_at": STEP, "place": PLACE} until it kills itself
there ("moment": at a random time from there on; "corrupt": its gradients are wrong from there on); {"save":
FILE} writes a checkpoint.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from datetime import timedelta
from typing import Any, NoReturn, Optional

import torch
import torch.distributed as dist
from events import Commands, emit
from loader_model import SETTINGS, dataset, loss_of, make_model, make_optimizer
from loader_streams import KINDS, collate, stream
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset

from torchft import DistributedDataParallel, Manager, Optimizer
from torchft.data import ElasticDataLoader
from torchft.data._step import Unit
from torchft.device_mesh import ft_init_device_mesh
from torchft.process_group import ProcessGroupGloo

parser = argparse.ArgumentParser()
parser.add_argument("--group", type=int, required=True)
parser.add_argument("--lighthouse", required=True)
parser.add_argument("--kind", choices=["ddp", "fsdp", "fsdp-sum"], required=True)
parser.add_argument("--reproducible", type=int, required=True)
parser.add_argument("--bf16", type=int, required=True, help="1: compute in bfloat16, reduce in float32")
parser.add_argument("--device", choices=["cpu", "late"], required=True, help="late: the test accelerator")
parser.add_argument("--heal", required=True, help="as of the Manager")
parser.add_argument("--samples", type=int, required=True)
parser.add_argument("--seed", type=int, required=True, help="seed of the first weights")
parser.add_argument("--log", required=True, help="file for the samples of each step")
parser.add_argument("--weights", required=True, help="file for the final weights")
parser.add_argument("--num_workers", type=int, required=True, help="of the DataLoader")
parser.add_argument("--audit", type=float, required=True, help="as of the Manager")
parser.add_argument("--stream", choices=["", *KINDS], default="", help="the dataset is a stream")
parser.add_argument("--restore", default="", help="file of a checkpoint")
args = parser.parse_args()

TIMEOUT = timedelta(seconds=60)


class Mortal(Manager):
    """Ends in place of an allreduce, for which its peers then wait; or after the vote of its group, before
    its optimizer steps.
    """

    place: Optional[str] = None

    def allreduce(self, *given: Any, **more: Any) -> Any:
        if self.place == "reduce":
            fail()
        work = super().allreduce(*given, **more)
        if self.place == "between":
            work.wait()  # the others have begun the step, in which none has all gradients
            self.place = "reduce"
        return work

    def _try_step(self, timeout: timedelta) -> bool:
        committed = super()._try_step(timeout)
        if self.place == "commit":
            fail()
        return committed


def fail() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


class Broken(Dataset):
    """A dataset that raises an error after a command."""

    broken = False

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        if self.broken:
            raise OSError("the disk has failed")
        return self.data[index]


def corrupt(gradient: torch.Tensor) -> torch.Tensor:
    """Flips a bit of an element of a layer's gradients, as a broken processor may."""
    if manager.place != "corrupt":
        return gradient
    wrong = gradient.clone(memory_format=torch.contiguous_format)
    wrong.view(torch.int64).view(-1)[0] ^= 1 << 40
    return wrong


def load(state: dict[str, Any]) -> None:
    model.load_state_dict(state["model"])
    sgd.load_state_dict(state["sgd"])
    history[:] = state["history"]


def save() -> dict[str, Any]:
    return {"model": weights or model.state_dict(), "sgd": sgd.state_dict(), "history": list(history)}


torch.set_num_threads(1)
torch.use_deterministic_algorithms(args.audit > 0)
commands = Commands()
sharded = args.kind != "ddp"
reduction = "sum" if args.kind == "fsdp-sum" else "mean"
if args.device == "late":
    from tests.late import load as load_device

    load_device().delays(10 * args.group + int(os.environ["RANK"]), 0, 200)
    torch.accelerator.set_device_index(int(os.environ["RANK"]))
    from tests.late.group import ProcessGroupLate
model: Any = make_model(args.seed).to(args.device)
weights: dict[str, Any] = {}
history: list[int] = []  # the quorum of each committed step
if sharded:
    backend = "gloo" if args.device == "cpu" else "cpu:gloo,late:late"
    dist.init_process_group(backend, timeout=timedelta(seconds=120))
    where: dict[str, Any] = {}
else:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    where = {"rank": 0, "world_size": 1, "store_addr": "localhost", "store_port": store.port}
manager = Mortal(
    pg=ProcessGroupGloo(timeout=TIMEOUT) if args.device == "cpu" else ProcessGroupLate(timeout=TIMEOUT),
    load_state_dict=load,
    state_dict=save,
    min_replica_size=1,
    lighthouse_addr=args.lighthouse,
    replica_id=f"loader_{args.group}",
    timeout=TIMEOUT,
    quorum_timeout=TIMEOUT,
    connect_timeout=TIMEOUT,
    heartbeat_interval=timedelta(milliseconds=50),
    reproducible_reduction=bool(args.reproducible),
    audit=args.audit,
    heal=args.heal,
    **where,
)
if sharded:
    mesh = ft_init_device_mesh(
        device_type=args.device,
        mesh_shape=(1, dist.get_world_size()),
        mesh_dim_names=("replicate", "shard"),
        replicate_dim=0,
        manager=manager,
    )
    policy = MixedPrecisionPolicy()
    if args.bf16:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model[0], mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if reduction == "sum":
        for part in (model[0], model):
            part.set_gradient_divide_factor(1.0)
    # state_dict() is called once, here: see hsdp_worker.py.
    weights = model.state_dict()
if args.audit:
    model[0].register_forward_hook(lambda _, __, output: output.register_hook(corrupt) and None)
# a bucket for each parameter
wrapped = model if sharded else DistributedDataParallel(manager, model, bucket_cap_mb=2**-20)
sgd = make_optimizer(model)
optimizer = Optimizer(manager, sgd)
if args.num_workers:
    # A new object, because worker processes close sys.stdin, and the command thread holds the lock of the old
    # object.
    sys.stdin = open(os.devnull)  # noqa: SIM115
data = dataset(args.samples)
loader = ElasticDataLoader(
    manager,
    stream(args.stream, args.samples) if args.stream else Broken(data),
    shuffle=not args.stream,
    reproducible_rng=args.audit > 0,
    num_workers=args.num_workers,
    collate_fn=collate if args.stream else None,
    reduction_in_group=reduction,
    **SETTINGS,
)
if args.restore:
    saved = torch.load(args.restore)
    load(saved["user"])
    manager.load_state_dict(saved["manager"])
    loader.load_state_dict(saved["loader"])
manager.register_commit_hook(
    lambda _, committed, __: history.append(manager._quorum_id) if committed else None
)
log = open(args.log, "a", buffering=1)  # noqa: SIM115 (until the process ends)
emit("ready")


def obey() -> dict[str, Any]:
    while "save" in (command := commands.next()):
        states = {"user": save(), "manager": manager.state_dict(), "loader": loader.state_dict()}
        torch.save(states, command["save"])
        emit("saved")
    return command


def numbers(unit: Unit) -> list[int]:
    """The tokens of a unit of a stream."""
    sequences = unit.data[2][: len(unit.indices)]
    return sequences[sequences >= 0].tolist()


order: dict[str, Any] = {"until": 0}
random_ = random.Random()
end: Optional[threading.Timer] = None  # kills this process
began, took = time.monotonic(), 0.0  # the last step, in seconds
counted: list[int] = []  # the samples in the gradients of the last attempt at a step
while True:
    while manager.current_step() >= order["until"]:
        emit("paused", step=manager.current_step())
        order = obey()
    if (step := next(loader, None)) is None:
        break
    before = manager.current_step()
    place = order["place"] if before >= order.get("fail_at", before + 1) else ""
    began, took = time.monotonic(), time.monotonic() - began
    if place == "begin":
        fail()
    if place == "corrupt":  # all units of the step, so that the audited one is among them
        manager.place = place
    if place == "moment" and end is None:
        end = threading.Timer(2 * took * random_.random(), fail)
        end.start()
    Broken.broken = place == "dataset"
    for worker in multiprocessing.active_children() if place == "worker" else []:
        worker.kill()
    optimizer.zero_grad()
    indices = counted if step.again else []
    for unit in step:
        if unit.weight and not unit.repeated and not unit.audit:
            indices += numbers(unit) if args.stream else unit.indices
        if unit.last and not unit.repeated:
            manager.wait_quorum()
            if place == "units":
                fail()
            at = step.position
            log.write(json.dumps([at.epoch, at.batch, manager._quorum_id, indices]) + "\n")
            manager.place = place
        with unit.accumulate(wrapped):
            (loss_of(wrapped, *(part.to(args.device) for part in unit.data[:2])) * unit.weight).backward()
    counted = indices
    optimizer.step()
    if manager._weights_are_inconsistent():
        emit("in_passing", step=before)
    if place == "stepped":
        fail()

if end is not None:
    end.join()
full = {
    name: (p.full_tensor() if isinstance(p, DTensor) else p.detach()).cpu()
    for name, p in model.named_parameters()
}
torch.save({"weights": full, "history": history}, args.weights)
emit("finished")
manager.shutdown()
if sharded:
    dist.barrier()  # rank 0 hosts the store
os._exit(0)
