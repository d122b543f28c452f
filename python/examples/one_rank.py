"""The abilities of PyTorch in a group of which one rank is killed (docs/internals/design.md).

Of two ranks that train with FSDP2, one is killed in a backward pass. The other keeps its process and its
shard: their group is reconfigured in place, FSDP2 drops the step (PyTorch 2.15), and a new rank joins with a
copy of its own shard. Then one step changes all of a shard, as do the steps that other groups do meanwhile.
"""

import multiprocessing
import os
import signal
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard

from torchft.process_group import reconfigure_with_store
from torchft.process_group.native import abort_group

STEPS, FAILS, LAYERS, WAIT = 4, 2, 3, timedelta(seconds=60)


def train(rank: int, life: int, killed: int, port: int, copies: torch.Tensor, seen: torch.Tensor) -> None:
    store = dist.TCPStore("127.0.0.1", port, timeout=WAIT)
    dist.init_process_group("gloo", None, WAIT, 2, rank, store, enable_reconfigure=True)
    world: Any = dist.group.WORLD
    reconfigure_with_store(world, f"127.0.0.1:{port}/{life}", rank, 2, WAIT)
    torch.manual_seed(0)
    net: Any = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(LAYERS)))
    for module in (*net, net):
        fully_shard(module)
    sgd = torch.optim.SGD(net.parameters(), lr=0.01)
    shards = [weight.to_local() for weight in net.parameters()]
    first = shards[0].data_ptr()
    if life:
        for shard, copy in zip(shards, copies[rank]):  # which another group would have
            shard.data.copy_(copy)
    elif rank == killed:
        net[1].register_full_backward_hook(lambda *_: os.kill(os.getpid(), 9) if step == FAILS else None)
    step = FAILS if life else 0
    while step < STEPS:
        copies[rank].copy_(torch.stack(shards).detach())
        sgd.zero_grad()
        try:
            batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * step + rank))
            net(batch).square().sum().backward()
        except RuntimeError:
            abort_group(world)
            net.reset_iter_state()
            life += 1
            reconfigure_with_store(world, f"127.0.0.1:{port}/{life}", rank, 2, WAIT)
            continue
        sgd.step()
        step += 1
    assert shards[0].data_ptr() == first == next(net.parameters()).to_local().data_ptr()
    changed = (copies[rank] != torch.stack(shards)).sum()
    seen[rank].copy_(torch.cat([net[0].weight.full_tensor().flatten().detach(), changed[None]]))


def job(killed: int = -1) -> torch.Tensor:
    """The first layer's weights at the end, and the elements that the last step changed, for each rank."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = torch.zeros(2, LAYERS, 4, 8).share_memory_(), torch.zeros(2, 65).share_memory_()

    def start(rank: int, life: int) -> Any:
        args = (rank, life, killed, server.port, *shared)
        process = multiprocessing.get_context("fork").Process(target=train, args=args, daemon=True)
        process.start()
        return process

    ranks = [start(0, 0), start(1, 0)]
    if killed >= 0:
        ranks[killed].join(WAIT.seconds)
        assert ranks[killed].exitcode == -signal.SIGKILL
        ranks[killed] = start(killed, 1)
    for process in ranks:
        process.join(WAIT.seconds)
    assert [process.exitcode for process in ranks] == [0, 0]
    return shared[1]


def mesh_waits() -> bool:
    """Whether a new process cannot make the groups of a mesh of two dimensions without all of their ranks."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=2, enable_reconfigure=True)
    try:
        dist.new_group([0, 1], timeout=timedelta(seconds=1))
    except RuntimeError:
        return True
    return False


if __name__ == "__main__":
    if not hasattr(FSDPModule, "reset_iter_state"):
        sys.exit(f"PyTorch {torch.__version__} has no FSDPModule.reset_iter_state: no step follows an error")
    whole = job()
    for rank in range(2):
        print(f"rank {rank} killed: weights as without it: {torch.equal(job(rank)[:, :64], whole[:, :64])}")
    print(f"elements of a shard that one step changes: {int(whole[0, 64])} of {4 * 8 * LAYERS}")
    print(f"the groups of a mesh wait for the ranks that have theirs: {mesh_waits()}")
