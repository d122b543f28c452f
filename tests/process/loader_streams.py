"""The streams of test_loader.py, and the same training in one process."""

from __future__ import annotations

import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from loader_model import SETTINGS, loss_of, make_model, make_optimizer
from torchdata.stateful_dataloader import StatefulDataLoader

sys.path.append(str(Path(__file__).resolve().parents[2]))

from tests.unit.data.packed import Packed, Resuming, tokens
from torchft.data._prefetch import Key
from torchft.data._source_states import SourceStates
from torchft.data._stream_reader import StreamReader, shards_of
from torchft.data.position import DataPosition
from torchft.data.streams import StreamPlan

SIZE = 4  # tokens of a sequence
KINDS = ("packed", "torchdata")  # documents as shards; one stream with a state

Batch = tuple[int, int, Counter[int]]  # epoch, batch, how often each token is in it


class Whole(Resuming):
    """Cannot be cut."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("shard", "num_shards"):
            raise AttributeError(name)
        return super().__getattribute__(name)


def stream(kind: str, sequences: int) -> Any:
    """A stream of about this number of sequences, in documents of different lengths."""
    rng = random.Random(1)
    lengths = [rng.randint(0, SIZE * sequences // 12) for _ in range(24)]
    if kind == "packed":
        return Packed(lengths, SIZE)
    return StatefulDataLoader(Whole(lengths, SIZE), batch_size=None, collate_fn=tuple)


def collate(sequences: list[tuple[int, ...]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the model gets, what it is to give, and the tokens."""
    numbers = torch.tensor(sequences)
    x = torch.where(numbers < 0, 0, torch.sin(1 + numbers.double()))
    return x, x.sum(1, keepdim=True).tanh(), numbers


def one_process(kind: str, sequences: int) -> tuple[dict[str, torch.Tensor], list[Batch]]:
    """Trains on the stream. Returns the weights, and what is in each batch."""
    data, model = stream(kind, sequences), make_model(0)
    sgd = make_optimizer(model)
    sizes = SETTINGS["global_batch_size"], SETTINGS["micro_batch_size"]
    plan = StreamPlan.of(*sizes, SETTINGS["epochs"], shards_of(data))
    reader = StreamReader(data, plan, 1, SourceStates())
    position, ended, batches = DataPosition(), 0, list[Batch]()
    while position != plan.end:
        reads = [reader.__getitems__(Key(position, unit)) for unit in range(plan.num_units(position))]
        found = [sequence for read in reads for sequence in read.data[: read.samples]]
        sgd.zero_grad()
        x, y, _ = collate(found or reads[0].data)  # a batch without samples moves by momentum only
        (loss_of(model, x, y) * (len(found) / plan.global_batch_size)).backward()
        sgd.step()
        batches.append((position.epoch, position.batch, tokens(found)))
        counted = sum(plan.count(read.samples, read.more) for read in reads)
        position, ended = plan.after(position, ended, counted)
    return {name: p.detach() for name, p in model.named_parameters()}, batches
