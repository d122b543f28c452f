"""Functions of the examples other than train_ddp.py: data, the end of a job at the same step in all groups,
events.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import time
from pathlib import Path
from typing import Any, Iterator

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from torchft import DistributedSampler, Manager
from train_ddp import load_images as load_digits
from train_fsdp import sha256_of as sha256_of


def at_the_end(manager: Manager, steps: int, overtime: int, groups: int) -> bool:
    """Whether the job ends with the weights of this quorum, which has been requested already.

    The decision depends only on the quorum: all of its members see the same step and the same number of
    groups that are up to date, so all end together and with the same weights. While a group is missing or
    behind, the others continue for at most `overtime` steps, as sources from which that group can heal.
    """
    if manager.current_step() < steps:
        return False
    up_to_date = manager.num_participants()  # waits for the quorum
    if not manager.is_participating():
        # This group is behind: it knows the others' step, but gets their weights only in the next step.
        return False
    return up_to_date >= groups or manager.current_step() >= steps + overtime


def average_in_group(net: nn.Module) -> None:
    """Averages the gradients over the ranks of this replica group.

    torchft averages over the groups, each rank with the ranks of the same number. If a rank of this group
    fails, this raises an error: torchrun then restarts the whole group, and the group heals.
    """
    if dist.get_world_size() == 1:
        return
    grads = [p.grad for p in net.parameters() if p.grad is not None]
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for grad, mean in zip(grads, flat.split([grad.numel() for grad in grads])):
        grad.copy_(mean.view_as(grad))


class Batches(Iterator[list[Tensor]]):
    """The batches of this rank's shard, epoch after epoch. The state is the position in them."""

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
            raise ValueError(
                "--data cifar10 needs --data-dir, the folder with the files of cifar-10-batches-py"
            )
        return read_cifar10(folder, train=True), read_cifar10(folder, train=False)
    return numbered(*load_digits().tensors), numbered(*load_digits(held_out=True).tensors)


def numbered(pixels: Tensor, labels: Tensor) -> TensorDataset:
    return TensorDataset(pixels, labels, torch.arange(len(labels)))


def read_cifar10(folder: Path, train: bool) -> TensorDataset:
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
    scaled = torch.from_numpy(pixels).view(-1, 3, 32, 32).to(torch.get_default_dtype()) / 255 * 2 - 1
    return numbered(scaled, torch.from_numpy(labels).long())


ARRAY_CLASSES = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
}


class ArrayUnpickler(pickle.Unpickler):
    """Reads numpy arrays and plain values. It refuses every other class, so that a pickle cannot run code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ARRAY_CLASSES:
            raise pickle.UnpicklingError(f"{module}.{name} does not belong in a CIFAR-10 file")
        return super().find_class(module, name)


@torch.no_grad()
def evaluate(net: nn.Module, images: TensorDataset, device: torch.device) -> float:
    """The share of images that are classified correctly."""
    pixels, labels, _ = images.tensors
    guesses = torch.cat([net(part.to(device)).argmax(1).cpu() for part in pixels.split(500)])
    return (guesses == labels).float().mean().item()


@torch.no_grad()
def bits_per_byte(net: nn.Module, text: Tensor, context: int) -> float:
    """The number of bits that a language model needs for a byte of a held-out text."""
    pieces = text[: len(text) // (context + 1) * (context + 1)].view(-1, context + 1).long()
    total = 0.0
    for part in pieces.split(64):
        logits = net(part[:, :-1]).flatten(0, 1)
        total += nn.functional.cross_entropy(logits, part[:, 1:].flatten(), reduction="sum").item()
    return total / (pieces.shape[0] * context) / math.log(2)


class Events:
    """Appends JSON lines to folder/group-G-rank-R.jsonl, for a program that follows the training."""

    def __init__(self, folder: Path | None, group: int, rank: int) -> None:
        self._path = folder and folder / f"group-{group}-rank-{rank}.jsonl"
        if folder:
            folder.mkdir(parents=True, exist_ok=True)

    def write(self, event: str, **fields: object) -> None:
        """Appends an event; ``time`` is the wall-clock time in seconds."""
        if self._path:
            with self._path.open("a") as file:
                file.write(json.dumps({"event": event, "time": time.time(), **fields}) + "\n")


def int_from_env(name: str) -> int:
    value = os.environ.get(name)
    if value is None or not value.isdecimal():
        raise ValueError(f"environment variable {name} must be an integer of at least 0, got {value!r}")
    return int(value)


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value
