"""States of ranks for tests of the disk tier, and what reads their checkpoints."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from torchft.checkpointing.codec.encoding import Encoded
from torchft.checkpointing.codec.stream import storage_bytes
from torchft.checkpointing.snapshots.disk import Content
from torchft.checkpointing.snapshots.reading import Slot, local, read
from torchft.checkpointing.snapshots.saving import Save
from torchft.checkpointing.snapshots.slots import read_header


def content(state: Any, rank: int = 0) -> Content:
    """What a state adds to a checkpoint, as from its slot."""
    encoded = Encoded(state)
    flats = [storage_bytes(storage) for storage in encoded.storages]
    return Content(json.loads(encoded.structure), flats, rank, f"the state of rank {rank}")


def copied(path: Path) -> Slot:
    """Reads a slot of this host into memory of this process."""
    return read([local(path)], read_header(path).state)


@contextmanager
def as_rank(rank: int, ranks: int) -> Iterator[None]:
    """Makes this process a rank of a group whose others do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def plain(step: int = 0) -> dict[str, Any]:
    """A state of a group of one rank."""
    weight = torch.arange(12.0).reshape(4, 3) + step
    return {
        "model": {"w": weight, "scalar": torch.tensor(float(step)), "empty": torch.empty(0, 3)},
        "optimizer": {"state": [{"exp_avg": weight.t() / 2, "step": torch.tensor(step)}], "lr": 0.1},
        "data": {"epoch": step, "odd": (1, "two", None), "bytes": b"\1\2"},
        "big": torch.arange(5000) + step,
    }


def zeros(state: Any) -> Any:
    """A state of the same form, to read into."""
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    if isinstance(state, dict):
        return {key: zeros(value) for key, value in state.items()}
    return [zeros(value) for value in state] if isinstance(state, list) else None


def load(checkpoint: Path, state: Any) -> Any:
    """Reads a checkpoint into a state of the same form."""
    read = zeros(state)
    dcp.load(read, checkpoint_id=checkpoint, no_dist=True)
    return read


def save(folder: Path, step: int, key: str = "k", parts: int = 1, make: Callable[[int], Any] = plain) -> None:
    """Writes a checkpoint of a group of one rank."""
    one = Save(folder, step, key, 1, parts)
    of = content(make(step))
    one.announce(0, of)
    for unit in one.missing():
        one.write(unit, of)
    one.complete()


def run(script: str, *arguments: object) -> str:
    """Runs a script in a process that cannot import torchft. Returns what it prints."""
    blocked = (
        f"import sys, warnings; sys.modules['torchft'] = None; warnings.simplefilter('ignore')\n{script}"
    )
    command = [sys.executable, "-c", blocked, *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
