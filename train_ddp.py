"""Trains a small CNN on real images, in replica groups that may fail. Each image counts once per epoch.

Start a lighthouse, then one of these for every replica group (GROUP = 0, 1, ...):

    torchft_lighthouse --min_replicas 1
    REPLICA_GROUP_ID=GROUP TORCHFT_LIGHTHOUSE=http://localhost:29510 torchrun --nproc_per_node 1 train_ddp.py

Kill a group and restart it: the others continue, and it takes over their weights and position in the data.
"""

import argparse
import ctypes
import hashlib
import math
import os
import signal
from datetime import timedelta
from importlib.metadata import distribution
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from torchft import DistributedDataParallel, Manager, Optimizer, process_group
from torchft.data import ElasticDataLoader

criterion = nn.CrossEntropyLoss()


def main(args: argparse.Namespace) -> nn.Module:
    end_with_parent()
    group, rank = os.environ.get("REPLICA_GROUP_ID", "0"), int(os.environ["RANK"])
    device = pick_device(args.device)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)  # every rank of every group starts from the same weights
    images = load_images()
    net = small_cnn(images.tensors[0].shape[1]).to(device)
    adam = torch.optim.Adam(net.parameters(), lr=1e-3)
    kind = "NCCL" if device.type == "cuda" else "Gloo"
    init_process_group_of_this_group(kind.lower())
    pg = getattr(process_group, f"ProcessGroup{'Baby' * args.isolated}{kind}")()
    manager = Manager(
        pg,
        state_dict=lambda: {"net": net.state_dict(), "adam": adam.state_dict()},
        load_state_dict=lambda s: (net.load_state_dict(s["net"]), adam.load_state_dict(s["adam"])),  # type: ignore
        min_replica_size=1,
        replica_id=f"train_ddp_{group}",
        timeout=timedelta(seconds=args.timeout),
        reproducible_reduction=args.reproducible,
    )
    manager.leave_on(signal.SIGTERM)
    model, optimizer = DistributedDataParallel(manager, net), Optimizer(manager, adam)
    loader = ElasticDataLoader(
        manager,
        images,
        global_batch_size=args.batch_size,
        micro_batch_size=args.micro_batch_size,
        epochs=math.ceil(args.steps / math.ceil(len(images) / args.batch_size)),
        reduction_in_group="sum",
        num_workers=2,
        multiprocessing_context="fork",
        worker_init_fn=end_with_parent,
    )
    parts = {"manager": manager, "loader": loader, "net": net, "adam": adam}
    checkpoint = args.checkpoint_dir and args.checkpoint_dir / f"group-{group}.pt"
    if checkpoint and checkpoint.exists():
        for name, state in torch.load(checkpoint, "cpu", weights_only=True).items():
            parts[name].load_state_dict(state)

    for step in loader:  # one step of the optimizer; its quorum is known here
        loss = torch.tensor(float("nan"))  # what is printed of a rank that has no micro-batch
        optimizer.zero_grad()
        for unit in step:  # the micro-batches of this rank
            pixels, labels = (part.to(device) for part in unit.data)
            with unit.accumulate(model):  # the backward pass of the last one sums over the groups
                loss = criterion(model(pixels), labels)
                (loss * unit.weight).backward()
        if dist.get_world_size() > 1 and not args.reproducible:  # else summed already
            for grad in [p.grad for p in net.parameters() if p.grad is not None]:
                dist.all_reduce(grad)
        optimizer.step()  # only if all ranks of this group succeeded; else the same batch is repeated
        # If the step was not committed, the weights may be half a heal's.
        number, reports = manager.current_step(), rank == 0 and step.committed
        if reports and number % 50 == 0:
            print(f"group {group} step {number} loss {loss:.4f} groups {step.participants}", flush=True)
        if checkpoint and reports and number % args.checkpoint_every == 0:
            checkpoint.parent.mkdir(parents=True, exist_ok=True)
            torch.save({name: part.state_dict() for name, part in parts.items()}, f"{checkpoint}.partial")
            os.replace(f"{checkpoint}.partial", checkpoint)  # the file is complete whenever it exists

    dist.barrier()  # rank 0 ends the manager server of this group, which the others need until they are here
    manager.shutdown(finished=not manager.draining())
    pg.shutdown()
    dist.destroy_process_group()
    digest = hashlib.sha256(
        b"".join(p.detach().cpu().numpy().tobytes() for p in net.parameters())
    ).hexdigest()
    print(f"group {group} rank {rank} ended at step {manager.current_step()}, sha256 of the weights {digest}")
    return net


def load_images(held_out: bool = False) -> TensorDataset:
    """1797 digits of 8x8 pixels, from a file of scikit-learn. Every fifth is held out."""
    file = str(distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz"))
    table = torch.from_numpy(np.loadtxt(file, delimiter=",")).to(torch.get_default_dtype())
    table = table[(torch.arange(len(table)) % 5 == 0) == held_out]
    return TensorDataset(table[:, :64].view(-1, 1, 8, 8) / 8 - 1, table[:, 64].long())


def small_cnn(channels: int) -> nn.Sequential:
    """Maps images (N, channels, height, width) to 10 classes. A BatchNorm would depend on the batch."""
    first = [nn.Conv2d(channels, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU()]
    second = [nn.MaxPool2d(2), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4)]
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(64 * 4 * 4, 10))


def init_process_group_of_this_group(backend: str) -> None:
    """With --max_restarts torchrun keeps its store and what failed ranks put in: each start has a prefix."""
    store, rank, ranks = next(dist.rendezvous("env://"))
    store = dist.PrefixStore(f"restart-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)


def pick_device(name: str) -> torch.device:
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    rank, devices = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if rank >= devices > 1:
        visible = f"{devices} are visible (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')})"
        raise SystemExit(f"LOCAL_RANK={rank} has no device: {visible}")
    torch.cuda.set_device(rank if devices > 1 else 0)  # the only one may differ from rank to rank
    return torch.device("cuda", torch.cuda.current_device())


def end_with_parent(_worker: int = 0) -> None:
    """Makes the kernel kill this process with its parent: torchrun's agent, or the rank of a worker."""
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, default=2000, help="steps after which the job ends, at the end of the epoch")
    add("--batch-size", type=int, default=64, help="images of a step, for all groups together")
    add("--micro-batch-size", type=int, default=16, help="images of a forward and backward pass")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto")
    add("--isolated", action="store_true", help="run operations between groups in another process")
    add("--reproducible", action="store_true", help="make the sum of gradients independent of its order")
    add("--threads", type=int, default=1, help="CPU threads for the computation")
    add("--timeout", type=float, default=30, help="seconds that one step may wait for another group")
    add("--checkpoint-dir", type=Path, help="a folder to resume from, and to save to")
    add("--checkpoint-every", type=int, default=100, help="in steps")
    return parser.parse_args()


if __name__ == "__main__":
    main(parse_args())
