"""A replica group of one process that trains a tiny model, with the torchft on PYTHONPATH.

Commands, in this order: {"do": "join", "lighthouse": ADDRESS} makes the Manager (answered by `ready`), {"do":
"train"} begins, {"do": "finish", "step": N} ends after step N. Each step prints the digest of the weights.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from events import Commands, emit
from torch import nn, optim
from torch.distributed import TCPStore
from torch.distributed.fsdp import fully_shard

import torchft
from torchft import Manager, Optimizer, ProcessGroupGloo
from torchft.process_group import ProcessGroupBabyGloo

parser = argparse.ArgumentParser()
parser.add_argument("--group", type=int, required=True)
parser.add_argument(
    "--seed", type=int, required=True, help="seed of the first weights, different for each group"
)
parser.add_argument(
    "--compute_s", type=float, default=0.04, help="seconds between zero_grad and the forward pass"
)
parser.add_argument("--width", type=int, default=16, help="width of the hidden layer")
parser.add_argument(
    "--sharded", action="store_true", help="train with FSDP2, whose hook sums over the groups"
)
parser.add_argument("--undeclared", action="store_true", help="wrap neither model nor optimizer")
parser.add_argument("--isolated", action="store_true", help="run the collectives in a separate process")
parser.add_argument("--set-fns", action="store_true", help="set the state after the Manager was made")
parser.add_argument("--heal-along", action="store_true", help="heal in passing, if this torchft can")
args = parser.parse_args()
if args.heal_along:
    os.environ["TORCHFT_HEAL_ALONG"] = "1"  # upstream has no argument for it

commands = Commands()
torch.set_num_threads(1)
torch.manual_seed(args.seed)
model = nn.Sequential(nn.Linear(8, args.width), nn.Tanh(), nn.Linear(args.width, 4))
if args.sharded:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    fully_shard(model)
# Upstream calls state_dict() during the forward pass, in which FSDP2's would free the weights.
weights = model.state_dict() if args.sharded else {}
adam = optim.Adam(model.parameters(), lr=1e-2)
emit("imported")
command = commands.next()
assert command["do"] == "join"


def digest() -> str:
    sha = hashlib.sha256()
    for name, tensor in sorted((weights or model.state_dict()).items()):
        sha.update(name.encode())
        local = getattr(tensor, "to_local", lambda t=tensor: t)()
        sha.update(local.contiguous().numpy().tobytes())
    return sha.hexdigest()


def state_dict() -> dict[str, dict]:
    return {"model": weights or model.state_dict(), "optim": adam.state_dict()}


def load_state_dict(state: dict[str, dict]) -> None:
    model.load_state_dict(state["model"])
    adam.load_state_dict(state["optim"])
    emit("loaded", digest=digest())


# Hosts the group's store, like torchrun's agent.
store = TCPStore("localhost", int(os.environ["MASTER_PORT"]), is_master=True, wait_for_workers=False)
manager = Manager(
    pg=(ProcessGroupBabyGloo if args.isolated else ProcessGroupGloo)(timeout=timedelta(seconds=10)),
    load_state_dict=None if args.set_fns else load_state_dict,
    state_dict=None if args.set_fns else state_dict,
    min_replica_size=1,
    lighthouse_addr=command["lighthouse"],
    replica_id=f"worker_{args.group}",
    timeout=timedelta(seconds=10),
    quorum_timeout=timedelta(seconds=15),
    connect_timeout=timedelta(seconds=10),
)
if args.set_fns:
    manager.set_state_dict_fns(load_state_dict, state_dict)
optimizer = None if args.undeclared else Optimizer(manager, adam)
if args.sharded:
    model.set_all_reduce_hook(lambda gradient: manager.allreduce(gradient).wait() and None)
emit("ready", digest=digest(), torchft=os.path.dirname(torchft.__file__))
assert commands.next()["do"] == "train"

last_step = None
while last_step is None or manager.current_step() < last_step:
    if (command := commands.poll()) is not None:
        assert command["do"] == "finish"
        last_step = command["step"]
        continue
    step = manager.current_step()
    # The batch depends on the step and the group, so a step that two groups did not share changes the digest.
    batch = torch.Generator().manual_seed(1000 * step + args.group)
    x, y = torch.randn(16, 8, generator=batch), torch.randn(16, 4, generator=batch)
    if optimizer is not None:
        optimizer.zero_grad()
    else:
        manager.start_quorum()
        adam.zero_grad()
    # Simulates computation, so that a joining group can heal. An upstream source withdraws its checkpoint
    # when it commits: without this it often commits before any target, upstream or ours, has fetched it.
    time.sleep(args.compute_s)
    nn.functional.mse_loss(model(x), y).backward()
    # Not DistributedDataParallel: in upstream 0.2.0 its backward raises an error if a peer failed before the
    # call.
    gradients = [] if args.sharded else [p.grad for p in model.parameters() if p.grad is not None]
    for work in [manager.allreduce(gradient) for gradient in gradients]:
        work.wait()
    if optimizer is not None:
        optimizer.step()
    elif manager.should_commit():
        adam.step()
    committed = manager.current_step() > step
    emit(
        "step",
        step=manager.current_step(),
        committed=committed,
        participants=manager.num_participants(),
        digest=digest(),
        batches=manager.batches_committed(),
    )

emit("finished", step=manager.current_step(), digest=digest())
manager.shutdown()
if args.sharded:
    dist.destroy_process_group()
