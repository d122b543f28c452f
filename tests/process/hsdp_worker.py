"""One rank of a replica group that trains with FSDP2: sharded over the group's ranks, replicated over the
groups. With --wrap=ddp, a group of one rank that trains with DDP.

Started like a torchrun worker (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT). With --native, the replicas'
group is PyTorch's own, which torchft reconfigures. With --device=late, it trains on the test accelerator
(tests/late). Prints every step, and at its end the full weights.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Optional

import torch
import torch.distributed as dist
from events import Commands, emit
from hsdp_model import Model, batch
from torch import nn
from torch.distributed import TCPStore
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from torchft import Manager, Optimizer, process_group
from torchft._manager.heal import in_passing_rules as rules
from torchft.checkpointing.codec.digest import memory_of
from torchft.ddp import DistributedDataParallel
from torchft.device_mesh import ft_init_device_mesh

parser = argparse.ArgumentParser()
parser.add_argument("--group", type=int, required=True)
parser.add_argument("--lighthouse", required=True)
parser.add_argument("--seed", type=int, required=True, help="seed of the first weights")
parser.add_argument("--fail_after", type=int, default=-1, help="commits of this group after which it ends")
parser.add_argument("--device", choices=["cpu", "cuda", "late"], default="cpu")
parser.add_argument("--delays", type=int, default=0, help="seed of the delays of the test accelerator")
parser.add_argument(
    "--kind", default="ProcessGroupGloo", help="class of the process group between the replica groups"
)
parser.add_argument("--wrap", choices=["fsdp", "ddp"], default="fsdp")
parser.add_argument("--bf16", type=int, default=0, help="1: compute in bfloat16, reduce in float32")
parser.add_argument(
    "--compare",
    type=int,
    default=0,
    help="commits in which all weights are compared once; a group that differs heals",
)
parser.add_argument(
    "--flip", type=int, default=-1, help="step before which a bit of the last rank's shard flips"
)
parser.add_argument(
    "--along", type=int, default=0, help="heal in parts of this many elements, one per step; 0: at once"
)
parser.add_argument(
    "--fail_at",
    type=int,
    default=0,
    help="the last rank ends when it has so many elements of a heal; 0: never",
)
parser.add_argument("--native", type=int, default=0, help="port of the store that all groups share")
args = parser.parse_args()

TIMEOUT = timedelta(seconds=20)
rank, shards = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
commands = Commands()
torch.set_num_threads(1)


def replicas() -> dist.ProcessGroup:
    if args.device == "late":
        isolated = args.kind == "ProcessGroupBabyLate"
        return ProcessGroupBabyLate(timeout=TIMEOUT) if isolated else ProcessGroupLate(timeout=TIMEOUT)
    if not args.native:
        return getattr(process_group, args.kind)(timeout=TIMEOUT)
    store = dist.PrefixStore(f"shard{rank}", TCPStore("localhost", args.native, wait_for_workers=False))
    group = dist.ProcessGroup(store, args.group, 8)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    backend = dist.ProcessGroupGloo(store, args.group, 8, timeout=TIMEOUT, enable_reconfigure=True)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group


def one_part_a_step(elements: int) -> None:
    """Lets this rank request one part of this size in each step."""
    rules.FIRST = rules.LEAST = rules.MOST = elements
    in_step: dict[rules.Heal, Optional[int]] = {}
    following, arrived = rules.Heal.next, rules.Heal.arrived

    def next_part(heal: rules.Heal) -> rules.Ask:
        return rules.Ask(0, 0, 0, 0) if in_step.get(heal) == heal.step else following(heal)

    def here(heal: rules.Heal, ask: rules.Ask, share: float) -> None:
        in_step[heal] = heal.step
        arrived(heal, ask, share)

    rules.Heal.next, rules.Heal.arrived = next_part, here  # type: ignore[method-assign]


if args.device == "cuda":
    torch.cuda.set_device((shards * args.group + rank) % torch.cuda.device_count())
if args.device == "late":
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    from tests.late import load

    load().delays(1000 * args.delays + 10 * args.group + rank, 0, 200)
    torch.accelerator.set_device_index(rank)
    from tests.late.group import ProcessGroupLate
    from tests.late.isolated import ProcessGroupBabyLate
# The timeout below is long, because the other rank may still be importing PyTorch.
shards_over = {"cpu": "gloo", "cuda": "nccl", "late": "cpu:gloo,late:late"}[args.device]
if args.wrap == "ddp":
    shards_over = "gloo"
dist.init_process_group(shards_over, timeout=timedelta(seconds=120))
if args.along:
    one_part_a_step(args.along)
torch.manual_seed(args.seed)
model = Model().to(args.device)
manager = Manager(
    pg=replicas(),
    load_state_dict=None,
    state_dict=None,
    min_replica_size=1,
    init_sync=False,  # all groups contribute from the first step on
    lighthouse_addr=args.lighthouse,
    replica_id=f"hsdp_{args.group}",
    timeout=TIMEOUT,
    quorum_timeout=TIMEOUT,
    connect_timeout=TIMEOUT,
    heartbeat_interval=timedelta(milliseconds=50),
    compare_commits=args.compare,
    on_divergence="heal",
    heal_along=bool(args.along),
)
forward: nn.Module = model
if args.wrap == "ddp":
    forward = DistributedDataParallel(manager, model)
else:
    mesh = ft_init_device_mesh(
        device_type=args.device,
        mesh_shape=(2, shards),
        mesh_dim_names=("replicate", "shard"),
        replicate_dim=0,
        manager=manager,
    )
    policy = MixedPrecisionPolicy()
    if args.bf16:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
adam = torch.optim.Adam(model.parameters(), lr=1e-2)
manager.set_state_dict_fns(
    lambda s: (model.load_state_dict(s["model"]), adam.load_state_dict(s["optim"])),
    lambda: {"model": model.state_dict(), "optim": adam.state_dict()},
)
optimizer = Optimizer(manager, adam)
emit("ready")
assert commands.next()["do"] == "train"

last_step, commits = None, 0
decisions: list[bool] = []
manager.register_commit_hook(lambda step, committed, participants: decisions.append(committed))
while last_step is None or manager.current_step() < last_step:
    if (command := commands.poll()) is not None:
        assert command["do"] == "finish"
        last_step = command["step"]
        continue
    step = manager.current_step()
    if step == args.flip and rank == shards - 1:
        args.flip = -1
        memory_of(next(model.parameters()))[0] ^= 16
    optimizer.zero_grad()
    time.sleep(0.02)  # time for a joining group to heal
    x, y = (t.to(args.device) for t in batch(step, args.group, rank))
    output = forward(x)
    loss = nn.functional.mse_loss(output, y.to(output.dtype))
    if commits == args.fail_after:
        # Not before the quorum: the other group must expect this one in its collectives.
        manager.wait_quorum()
        os._exit(9)
    loss.backward()
    participants = manager.num_participants()
    optimizer.step()
    committed = decisions[-1]
    commits += committed
    error = "" if manager.errored() is None else str(manager.errored())
    here = re.match(r"(\d+) of \d+ elements", error)
    if args.fail_at and rank == shards - 1 and here is not None and int(here[1]) >= args.fail_at:
        args.fail_after = commits
    emit(
        "step",
        step=step,
        committed=committed,
        participants=participants,
        error=error[:200] or None,
    )

full = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}
emit("finished", weights={name: p.flatten().tolist() for name, p in full.items()})
manager.shutdown()
dist.barrier()  # rank 0 hosts the store
os._exit(0)
