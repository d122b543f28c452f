"""Trains a small CNN on real images, in several replica groups that may die and come back.

Start a lighthouse, then one of these for every replica group (GROUP = 0 ... NUM_REPLICA_GROUPS - 1):

    torchft_lighthouse --min_replicas 1

    REPLICA_GROUP_ID=GROUP NUM_REPLICA_GROUPS=2 TORCHFT_LIGHTHOUSE=http://localhost:29510 \\
        torchrun --nproc_per_node 1 train_ddp.py

Kill a group, start it again: the others train on meanwhile, and it takes over their weights.
The gradient of a step is the mean over all ranks of all groups: torchft averages over the groups,
`average_in_group` over the ranks of one group. So all ranks of the job hold the same weights.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import pickle
import shutil
import signal
import sys
import time
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Iterator

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from torchft import DistributedDataParallel, DistributedSampler, Manager, Optimizer


def main() -> None:
    args = parse_args()
    end_with_parent()
    group, groups = int_from_env("REPLICA_GROUP_ID"), int_from_env("NUM_REPLICA_GROUPS")
    rank, ranks = int_from_env("RANK"), int_from_env("WORLD_SIZE")
    device = pick_device(args.device)
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)  # every rank of every group starts from the same weights
    events = Events(args.events, group, rank)

    # Data: a shard of its own for every rank of every group.
    train_set, test_set = load_images(args.data, args.data_dir)
    sampler = DistributedSampler(train_set, group, groups, group_rank=rank, num_replicas=ranks, seed=args.seed)
    loader = StatefulDataLoader(
        train_set,
        args.batch_size,
        sampler=sampler,
        num_workers=2,
        multiprocessing_context="fork",
        persistent_workers=True,
        worker_init_fn=end_with_parent,
    )
    batches = Batches(loader, sampler)

    # The model, and what a group that comes back takes over from another one.
    net = SmallCNN(train_set.tensors[0].shape[1]).to(device)
    adam = torch.optim.Adam(net.parameters(), lr=args.lr)

    def save_state() -> dict[str, Any]:
        return {"net": net.state_dict(), "adam": adam.state_dict()}

    def load_state(state: dict[str, Any]) -> None:
        net.load_state_dict(state["net"])
        adam.load_state_dict(state["adam"])

    # torchft between the groups, a plain process group among the ranks of this one.
    init_process_group_of_this_group(device)
    pg = replica_process_group(device, args.isolated)
    manager = Manager(
        pg,
        load_state,
        save_state,
        min_replica_size=1,
        replica_id=f"train_ddp_{group}",
        timeout=timedelta(seconds=args.timeout),
    )
    model = DistributedDataParallel(manager, net)
    optimizer = Optimizer(manager, adam)

    # What a group that is started again reads from disk: the same, its step and its place in the data.
    folder = args.checkpoint_dir and args.checkpoint_dir / f"group-{group}"
    if folder and (checkpoint := load_checkpoint(folder, rank)):
        load_state(checkpoint["state"])
        manager.load_state_dict(checkpoint["manager"])
        batches.load_state_dict(checkpoint["batches"])

    # One event a step: what was trained on, with how many groups, and whether the step counted.
    events.write("start", step=manager.current_step(), pid=os.getpid())
    batch = None
    while not manager.draining():  # until somebody wants this group to leave: `torchft drain`
        optimizer.zero_grad()  # asks for the quorum of this step, in the background
        if at_the_end(manager, args.steps, args.overtime, groups):
            break

        batch = batch or next(batches)
        images, labels, indices = batch
        loss = F.cross_entropy(model(images.to(device)), labels.to(device))
        loss.backward()  # averages over the groups
        average_in_group(net)

        participants, step = manager.num_participants(), manager.current_step()
        healing = not manager.is_participating()
        optimizer.step()  # only if every rank of this group had a step without errors
        committed = manager.current_step() > step

        events.write(
            "commit" if committed else "lost",
            step=manager.current_step(),
            participants=participants,
            healing=healing,
            loss=loss.item(),
            indices=indices.tolist(),
            recovery=manager.recovery_seconds() if healing else None,
        )
        if healing or not committed:
            continue  # this batch did not count: take it again
        batch, step = None, manager.current_step()
        if rank == 0 and step % args.log_every == 0:
            print(f"group {group} step {step} loss {loss.item():.4f} groups {participants}", flush=True)
        if folder and step % args.checkpoint_every == 0:
            state = {
                "state": save_state(),
                "manager": manager.state_dict(),
                "batches": batches.state_dict(),
            }
            save_checkpoint(folder, step, rank, state)

    # Gone for the other groups before the evaluation, but not before every rank here has its quorum.
    dist.barrier()
    manager.shutdown(finished=not manager.draining())  # a group that was drained may come back
    pg.shutdown()
    dist.destroy_process_group()

    accuracy, digest = evaluate(net, test_set, device), sha256_of(net)
    events.write("end", step=manager.current_step(), accuracy=accuracy, sha256=digest)
    print(f"group {group} rank {rank} ended at step {manager.current_step()}, accuracy {accuracy:.4f}, sha256 {digest}")


def at_the_end(manager: Manager, steps: int, overtime: int, groups: int) -> bool:
    """Whether the job ends with the weights of this quorum, which has been asked for already.

    The decision belongs to the quorum: whoever is in it sees the same step and the same number of
    groups that are up to date, so all leave together and with the same weights. While a group is
    missing or behind, the others train on for at most `overtime` steps, so that it finds someone
    to heal from.
    """
    if manager.current_step() < steps:
        return False
    up_to_date = manager.num_participants()  # waits for the quorum
    if not manager.is_participating():
        return False  # this group is behind: it has the step of the others, and their weights after one step more
    return up_to_date >= groups or manager.current_step() >= steps + overtime


def average_in_group(net: nn.Module) -> None:
    """Averages the gradients over the ranks of this replica group.

    torchft averages over the groups, each rank with the ranks of its number. A rank that dies here
    makes this raise: torchrun then restarts the whole group, and the group heals.
    """
    if dist.get_world_size() == 1:
        return
    grads = [p.grad for p in net.parameters() if p.grad is not None]
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for grad, mean in zip(grads, flat.split([grad.numel() for grad in grads])):
        grad.copy_(mean.view_as(grad))


class SmallCNN(nn.Sequential):
    """Images of any size (N, channels, height, width) to 10 classes.

    No BatchNorm: its running statistics are of the rank's own shard and would differ among ranks.
    """

    def __init__(self, channels: int) -> None:
        super().__init__(
            nn.Conv2d(channels, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(64, 64, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(64 * 4 * 4, 10),
        )


class Batches(Iterator[list[Tensor]]):
    """The batches of this rank's shard, epoch after epoch, with the place in them as state."""

    def __init__(self, loader: StatefulDataLoader, sampler: DistributedSampler) -> None:
        self._loader = loader
        self._sampler = sampler
        self._epoch = 0
        self._rest: Iterator[list[Tensor]] | None = None

    def __next__(self) -> list[Tensor]:
        while True:
            if self._rest is None:
                self._sampler.set_epoch(self._epoch)  # another order in every epoch
                self._rest = iter(self._loader)
            for batch in self._rest:
                return batch
            self._epoch, self._rest = self._epoch + 1, None

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "loader": self._loader.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._epoch = state["epoch"]
        self._loader.load_state_dict(state["loader"])


def load_images(data: str, folder: Path | None) -> tuple[TensorDataset, TensorDataset]:
    """Training and held-out images: (pixels in [-1, 1], class, index of the image)."""
    if data == "cifar10":
        if folder is None:
            raise ValueError("--data cifar10 needs --data-dir, the folder with the files of cifar-10-batches-py")
        return as_dataset(*read_cifar10(folder, train=True)), as_dataset(*read_cifar10(folder, train=False))
    pixels, labels = read_digits()
    held_out = np.arange(len(labels)) % 5 == 0
    return as_dataset(pixels[~held_out], labels[~held_out]), as_dataset(pixels[held_out], labels[held_out])


def read_digits() -> tuple[np.ndarray, np.ndarray]:
    """1797 scanned digits of 8x8 pixels that come with scikit-learn.

    The file is read from the package: importing it takes seconds, which a restart would wait for.
    """
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise ValueError("--data digits needs scikit-learn: pip install scikit-learn")
    table = np.loadtxt(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    return table[:, :64].reshape(-1, 1, 8, 8) / 16, table[:, 64]


def as_dataset(pixels: np.ndarray, labels: np.ndarray) -> TensorDataset:
    """pixels: (N, channels, height, width) in [0, 1]."""
    return TensorDataset(
        torch.from_numpy(pixels).float() * 2 - 1,
        torch.from_numpy(labels).long(),
        torch.arange(len(labels)),
    )


def read_cifar10(folder: Path, train: bool) -> tuple[np.ndarray, np.ndarray]:
    """Reads the unpacked python version of CIFAR-10 (the folder cifar-10-batches-py, or its parent)."""
    inner = folder / "cifar-10-batches-py"
    folder = inner if inner.is_dir() else folder
    paths = [folder / f"data_batch_{i}" for i in range(1, 6)] if train else [folder / "test_batch"]
    batches = []
    for path in paths:
        if not path.is_file():
            raise ValueError(f"--data-dir: {path} is missing; expected the files of cifar-10-batches-py")
        with path.open("rb") as file:
            batches.append(ArrayUnpickler(file, encoding="bytes").load())
    pixels = np.concatenate([batch[b"data"] for batch in batches])
    labels = np.concatenate([batch[b"labels"] for batch in batches])
    return pixels.reshape(-1, 3, 32, 32) / np.float32(255), labels


OF_ARRAYS = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
}


class ArrayUnpickler(pickle.Unpickler):
    """Reads numpy arrays and plain values, and refuses whatever else a pickle could run."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in OF_ARRAYS:
            raise pickle.UnpicklingError(f"{module}.{name} does not belong in a CIFAR-10 file")
        return super().find_class(module, name)


def save_checkpoint(folder: Path, step: int, rank: int, state: dict[str, Any]) -> None:
    """Saves the parts of all ranks of this group as folder/step-N, which appears whole or not at all."""
    partial, done = folder / "partial", folder / f"step-{step}"
    partial.mkdir(parents=True, exist_ok=True)
    with open(partial / f"rank-{rank}.pt", "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    dist.barrier()  # every rank has written its part
    if rank == 0:
        older = list(folder.glob("step-*"))
        shutil.rmtree(done, ignore_errors=True)
        partial.rename(done)
        for path in set(older) - {done}:
            shutil.rmtree(path)


def load_checkpoint(folder: Path, rank: int) -> dict[str, Any] | None:
    """The newest checkpoint of this rank, None where there is none yet."""
    newest = max(folder.glob("step-*"), key=lambda path: int(path.name[5:]), default=None)
    if newest is None:
        return None
    return torch.load(newest / f"rank-{rank}.pt", map_location="cpu", weights_only=True)


@torch.no_grad()
def evaluate(net: nn.Module, images: TensorDataset, device: torch.device) -> float:
    """The share of images whose class is found."""
    pixels, labels, _ = images.tensors
    guesses = torch.cat([net(part.to(device)).argmax(1).cpu() for part in pixels.split(500)])
    return (guesses == labels).float().mean().item()


def sha256_of(net: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(net.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


class Events:
    """Appends JSON lines to folder/group-G-rank-R.jsonl, for a program that follows the training."""

    def __init__(self, folder: Path | None, group: int, rank: int) -> None:
        self._path = folder and folder / f"group-{group}-rank-{rank}.jsonl"
        if folder:
            folder.mkdir(parents=True, exist_ok=True)

    def write(self, event: str, **fields: object) -> None:
        """time is the wall clock, in seconds."""
        if self._path:
            with self._path.open("a") as file:
                file.write(json.dumps({"event": event, "time": time.time(), **fields}) + "\n")


def end_with_parent(_worker: int = 0) -> None:
    """Asks the kernel to kill this process when its parent dies (Linux).

    A killed torchrun would leave its workers behind, which train on. A killed worker would leave
    the processes of its data loader behind for some seconds: they were forked with its open
    connections, so the other groups would not see that it died.
    """
    if sys.platform == "linux":
        parent, PR_SET_PDEATHSIG = os.getppid(), 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died just before the call
            os._exit(1)


def pick_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device(name)
    device = torch.device(name, int_from_env("LOCAL_RANK"))
    torch.cuda.set_device(device)
    return device


def init_process_group_of_this_group(device: torch.device) -> None:
    """Like init_process_group() alone, but safe under torchrun's --max_restarts.

    torchrun keeps its store when it restarts the workers: addresses of dead ranks are still in it.
    """
    store, rank, ranks = next(dist.rendezvous("env://"))
    life = dist.PrefixStore(f"restart-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=life, rank=rank, world_size=ranks)


def replica_process_group(device: torch.device, isolated: bool) -> Any:
    """The group that spans the replica groups; isolated ones run in a process that can be killed."""
    from torchft import process_group

    backend = "NCCL" if device.type == "cuda" else "Gloo"
    return getattr(process_group, f"ProcessGroup{'Baby' if isolated else ''}{backend}")()


def int_from_env(name: str) -> int:
    value = os.environ.get(name)
    if value is None or not value.isdecimal():
        raise ValueError(f"environment variable {name} must be an integer of at least 0, got {value!r}")
    return int(value)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", choices=["digits", "cifar10"], default="digits", help="digits ships with scikit-learn")
    add("--data-dir", type=Path, help="where cifar-10-batches-py lies")
    add("--steps", type=positive, default=2000, help="committed steps until the end")
    add("--overtime", type=int, default=100, help="steps to go on at the end while a group is missing")
    add("--batch-size", type=positive, default=32, help="images per rank and step")
    add("--lr", type=float, default=1e-3)
    add("--seed", type=int, default=0, help="must be the same in all groups")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto")
    add("--isolated", action="store_true", help="run the operations between the groups in a process of their own")
    add("--threads", type=positive, default=1, help="CPU threads for the computation")
    add("--timeout", type=float, default=30, help="seconds that one step may wait for another group")
    add("--checkpoint-dir", type=Path, help="resume from here, and save here")
    add("--checkpoint-every", type=positive, default=100, help="in steps")
    add("--log-every", type=positive, default=50, help="in steps")
    add("--events", type=Path, metavar="DIR", help="write one JSON line a step, one file a rank")
    return parser.parse_args()


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


if __name__ == "__main__":
    main()
