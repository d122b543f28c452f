"""Trains a small transformer with FSDP2: sharded over the ranks of a replica group, replicated over the
groups (HSDP).

Start a lighthouse, then one of these for every replica group (GROUP = 0 ... NUM_REPLICA_GROUPS - 1):

    torchft_lighthouse --min_replicas 1

    REPLICA_GROUP_ID=GROUP NUM_REPLICA_GROUPS=2 TORCHFT_LIGHTHOUSE=http://localhost:29510 \\
        torchrun --nproc_per_node 2 --max_restarts 3 train_fsdp.py

Kill a rank: its group cannot continue without that shard, so torchrun restarts the whole group. The other
groups continue meanwhile. Each new rank heals from the rank of another group that has the same shard.

Two ways to average over the groups, --replicate:
mesh    a DeviceMesh of two dimensions, one of which torchft manages (`ft_init_device_mesh`);
hook    a mesh of this group alone, and a hook that FSDP2 calls with each reduced gradient
        (`set_all_reduce_hook`).
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torchdata.stateful_dataloader import StatefulDataLoader

from python.examples.parts import (
    Batches,
    Events,
    at_the_end,
    evaluate,
    int_from_env,
    load_images,
    positive,
    replica_process_group,
)
from torchft import DistributedSampler, Manager, Optimizer
from torchft.device_mesh import ft_init_device_mesh
from train_ddp import end_with_parent, init_process_group_of_this_group, pick_device


def main() -> None:
    args = parse_args()
    end_with_parent()
    group, groups = int_from_env("REPLICA_GROUP_ID"), int_from_env("NUM_REPLICA_GROUPS")
    rank, ranks = int_from_env("RANK"), int_from_env("WORLD_SIZE")
    device = pick_device(args.device)
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)  # every rank of every group starts from the same weights
    events = Events(args.events, group, rank)

    train_set, test_set = load_images("digits", None)
    sampler = DistributedSampler(
        train_set, group, groups, group_rank=rank, num_replicas=ranks, seed=args.seed
    )
    batches = Batches(StatefulDataLoader(train_set, args.batch_size, sampler=sampler), sampler)

    init_process_group_of_this_group("nccl" if device.type == "cuda" else "gloo")
    pg = replica_process_group(device, isolated=False)
    manager = Manager(
        pg,
        load_state_dict=None,  # `heal_with` registers the state, once the model is sharded
        state_dict=None,
        min_replica_size=1,
        replica_id=f"train_fsdp_{group}",
        timeout=timedelta(seconds=args.timeout),
    )
    manager.leave_on(signal.SIGTERM)
    net = Transformer(args.width, args.layers).to(device)
    shard(net, manager, device, args.replicate)
    adam = torch.optim.Adam(net.parameters(), lr=args.lr)
    heal_with(manager, net, adam)
    optimizer = Optimizer(manager, adam)

    events.write("start", step=manager.current_step(), pid=os.getpid())
    batch = None
    while not manager.draining():  # until this group is drained: `torchft drain`
        optimizer.zero_grad()  # requests the quorum of this step, in the background
        if at_the_end(manager, args.steps, args.overtime, groups):
            break

        batch = batch or next(batches)
        images, labels, _ = batch
        loss = F.cross_entropy(net(images.to(device)), labels.to(device))
        loss.backward()  # averages over the ranks of this group and over the groups

        participants, step = manager.num_participants(), manager.current_step()
        healing = not manager.is_participating()
        optimizer.step()  # steps only if every rank of this group had no error
        committed = manager.current_step() > step

        events.write(
            "commit" if committed else "lost",
            step=manager.current_step(),
            participants=participants,
            healing=healing,
            loss=loss.item(),
            recovery=manager.recovery_seconds() if healing else None,
        )
        if healing or not committed:
            continue  # this batch did not count, so it is repeated
        batch, step = None, manager.current_step()
        if rank == 0 and step % args.log_every == 0:
            print(f"group {group} step {step} loss {loss.item():.4f} groups {participants}", flush=True)

    # The group leaves the job before the evaluation, so that the others do not wait for it. The barrier comes
    # first, because rank 0 ends the manager server, and the other ranks must have received their last quorum
    # from it.
    dist.barrier()
    manager.shutdown(finished=not manager.draining())  # a group that was drained may come back
    accuracy, digest = evaluate(net, test_set, device), sha256_of_all_shards(net)
    events.write("end", step=manager.current_step(), accuracy=accuracy, sha256=digest)
    print(
        f"group {group} rank {rank} ended at step {manager.current_step()}, accuracy {accuracy:.4f}, "
        f"sha256 {digest}"
    )
    dist.barrier()  # no rank destroys its group while another one gathers shards
    pg.shutdown()
    dist.destroy_process_group()


def shard(net: Transformer, manager: Manager, device: torch.device, replicate: str) -> None:
    """Shards each block and the rest over the ranks of this group. Gradients are averaged over the groups."""
    ranks = dist.get_world_size()
    if replicate == "mesh":
        mesh = ft_init_device_mesh(
            device_type=device.type,
            mesh_shape=(1, ranks),  # the number of groups changes, and only the Manager knows it
            mesh_dim_names=("replicate", "shard"),
            replicate_dim=0,
            manager=manager,
        )
    else:
        mesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=("shard",))
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    if replicate == "hook":

        def average(gradients: Tensor) -> None:
            manager.allreduce(gradients).wait()

        for module in net.modules():
            if isinstance(module, FSDPModule):
                module.set_all_reduce_hook(average)


def heal_with(manager: Manager, net: nn.Module, adam: torch.optim.Optimizer) -> None:
    """Registers the state that a healing group takes over: for each rank the shards of its counterpart."""

    def save_state() -> dict[str, Any]:
        return {"net": net.state_dict(), "adam": adam.state_dict()}

    def load_state(state: dict[str, Any]) -> None:
        net.load_state_dict(state["net"])
        adam.load_state_dict(state["adam"])

    manager.set_state_dict_fns(load_state, save_state)


class Transformer(nn.Module):
    """Maps images (N, 1, 8, 8), as 16 patches of 2x2 pixels, to 10 classes."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Linear(4, width)
        self.place = nn.Parameter(torch.randn(16, width) / width**0.5)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(F.unfold(images, 2, stride=2).transpose(1, 2)) + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Block(nn.Module):
    """Attention and a feed-forward layer, on (N, tokens, width)."""

    HEADS = 4

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        n, tokens, width = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(n, tokens, 3, self.HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, tokens, width)
        x = x + self.out(attended)
        return x + self.mlp(self.norms[1](x))


def sha256_of_all_shards(net: nn.Module) -> str:
    """The digest of the complete weights, the same on all ranks. All ranks of the group must call it."""
    digest = hashlib.sha256()
    for name, shard in sorted(net.state_dict().items()):
        digest.update(name.encode())
        digest.update(shard.full_tensor().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--replicate",
        choices=["mesh", "hook"],
        default="mesh",
        help="how gradients are averaged over the groups",
    )
    add("--width", type=positive, default=32, help="a multiple of 4")
    add("--layers", type=positive, default=2)
    add("--steps", type=positive, default=600, help="committed steps until the end")
    add("--overtime", type=int, default=100, help="further steps at the end while a group is missing")
    add("--batch-size", type=positive, default=32, help="images per rank and step")
    add("--lr", type=float, default=1e-3)
    add("--seed", type=int, default=0, help="must be the same in all groups")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto")
    add("--threads", type=positive, default=1, help="CPU threads for the computation")
    add("--timeout", type=float, default=30, help="seconds that one step may wait for another group")
    add("--log-every", type=positive, default=50, help="in steps")
    add("--events", type=Path, metavar="DIR", help="write one JSON line a step, one file a rank")
    args = parser.parse_args()
    if args.width % Block.HEADS:
        parser.error(f"--width must be a multiple of {Block.HEADS}, got {args.width}")
    return args


if __name__ == "__main__":
    main()
