"""Trains a small language model with streaming DiLoCo: groups that communicate rarely, and may fail and come
back.

Start a lighthouse, then one of these for every replica group (GROUP = 0 ... NUM_REPLICA_GROUPS - 1):

    torchft_lighthouse --min_replicas 1

    REPLICA_GROUP_ID=GROUP NUM_REPLICA_GROUPS=2 TORCHFT_LIGHTHOUSE=http://localhost:29510 \\
        torchrun --nproc_per_node 1 train_diloco.py

The text is the source code of Python's standard library, a part of each installation. The model reads and
predicts bytes. Each group trains on its own part of the text with AdamW. In --sync-every inner steps each
fragment of the model is averaged over the groups once, one fragment after the other, while the next inner
steps run. One such average is one counted step. At the end all groups have the same global parameters.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sysconfig
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from python.examples.parts import Events, int_from_env, positive, replica_process_group, sha256_of
from torchft import Manager
from torchft.local_sgd import DiLoCo
from train_ddp import end_with_parent, pick_device


def main() -> None:
    args = parse_args()
    end_with_parent()
    group, groups = int_from_env("REPLICA_GROUP_ID"), int_from_env("NUM_REPLICA_GROUPS")
    if (ranks := int_from_env("WORLD_SIZE")) > 1:
        # Ranks of a group may heal from different groups, whose parameters differ between two
        # synchronisations.
        raise ValueError(f"--nproc_per_node {ranks}: a group of this script is one process")
    device = pick_device(args.device)
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)  # every group starts from the same weights
    events = Events(args.events, group, rank=0)

    # The data: a part of the text for each group
    train_text, test_text = standard_library(args.text_bytes)
    batches = Batches(train_text.chunk(groups)[group], args.batch_size, args.context)

    # The model, and the state that a restarted group takes over from another one. DiLoCo adds the global
    # parameters and the state of the outer optimizer.
    net = language_model(args.width, args.layers, args.context).to(device)
    inner = torch.optim.AdamW(net.parameters(), lr=args.lr)
    outer = torch.optim.SGD(net.parameters(), lr=args.outer_lr, momentum=0.9, nesterov=True)

    def save_state() -> dict[str, Any]:
        return {"net": net.state_dict(), "inner": inner.state_dict()}

    def load_state(state: dict[str, Any]) -> None:
        net.load_state_dict(state["net"])
        inner.load_state_dict(state["inner"])
        rounds.healed = True

    pg = replica_process_group(device, args.isolated)
    manager = Job(
        pg,
        load_state,
        save_state,
        min_replica_size=1,
        use_async_quorum=False,
        init_sync=False,  # the weights are the same already, so no group has to heal at step 0
        replica_id=f"train_diloco_{group}",
        timeout=timedelta(seconds=args.timeout),
        steps=args.steps,
        overtime=args.overtime,
        groups=groups,
    )
    manager.leave_on(signal.SIGTERM)
    rounds = Rounds(manager, events, f"group {group}", args.log_every)
    diloco = DiLoCo(
        manager,
        list(net),
        inner,
        outer,
        sync_every=args.sync_every,
        fragment_sync_delay=args.delay,
        fragment_update_alpha=args.alpha,
        should_quantize=args.quantize,
    )

    events.write("start", step=manager.current_step(), pid=os.getpid())
    try:
        with diloco:
            while not manager.draining():  # until this group is drained: `torchft drain`
                bytes_in, bytes_out = (part.to(device) for part in next(batches))
                inner.zero_grad()
                loss = F.cross_entropy(net(bytes_in).flatten(0, 1), bytes_out.flatten())
                loss.backward()
                rounds.losses.append(loss.item())
                inner.step()  # some of these steps start or end a synchronisation
    except TheEnd:
        pass

    # Leaves the other groups before the evaluation. A group that was drained may come back.
    manager.shutdown(finished=not manager.draining())
    pg.shutdown()

    diloco.restore_global_parameters()
    bits, digest = bits_per_byte(net, test_text.to(device), args.context), sha256_of(net)
    events.write("end", step=manager.current_step(), bits_per_byte=bits, sha256=digest)
    print(f"group {group} ended at step {manager.current_step()}, {bits:.3f} bits per byte, sha256 {digest}")


class TheEnd(Exception):
    """All groups of a quorum have completed the job."""


class Job(Manager):
    """Decides, in each quorum that DiLoCo requests, whether the job ends with this quorum.

    All members of a quorum see the same step and number of groups that are up to date, so all end together,
    with the same global parameters, and not while a group heals. While a group is missing, the others
    continue for at most `overtime` steps: a group that restarts meanwhile finds a source to heal from.
    """

    def __init__(self, *args: Any, steps: int, overtime: int, groups: int, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._steps, self._overtime, self._groups = steps, overtime, groups

    def start_quorum(self, *args: Any, **settings: Any) -> None:
        super().start_quorum(*args, **settings)
        over = self.current_step() - self._steps
        if over >= 0 and (self.num_up_to_date() >= self._groups or over >= self._overtime):
            raise TheEnd


class Rounds:
    """Writes an event for each synchronisation.

    Attributes:
        losses: losses of the inner steps since the last synchronisation.
        healed: whether another group's state was loaded since then.
    """

    def __init__(self, manager: Manager, events: Events, name: str, log_every: int) -> None:
        self.losses: list[float] = []
        self.healed = False
        self._manager, self._events, self._name, self._log_every = manager, events, name, log_every
        manager.register_commit_hook(self._decided)

    def _decided(self, step: int, committed: bool, participants: int) -> None:
        loss = sum(self.losses) / len(self.losses)
        self._events.write(
            "commit" if committed else "lost",
            step=step + committed,
            participants=participants,
            healing=self.healed,
            loss=loss,
            recovery=self._manager.recovery_seconds(),
        )
        if committed:
            self.healed = False
            if (step + 1) % self._log_every == 0:
                print(f"{self._name} step {step + 1} loss {loss:.4f} groups {participants}", flush=True)
        self.losses.clear()


def language_model(width: int, layers: int, context: int) -> nn.Sequential:
    """Maps bytes (N, T) to logits (N, T, 256), with T at most `context`. Each part is a fragment for
    DiLoCo.
    """
    return nn.Sequential(Embedding(width, context), *(Block(width) for _ in range(layers)), Head(width))


class Embedding(nn.Module):
    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.byte = nn.Embedding(256, width)
        self.place = nn.Parameter(0.02 * torch.randn(context, width))

    def forward(self, text: Tensor) -> Tensor:
        return self.byte(text) + self.place[: text.shape[1]]


class Block(nn.Module):
    """Causal attention and a feed-forward layer: (N, T, width) to the same shape."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 32)
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        n, t, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(n, t, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(n, t, width))
        return x + self.mlp(x)


class Head(nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(nn.LayerNorm(width), nn.Linear(width, 256))


def standard_library(limit: int) -> tuple[Tensor, Tensor]:
    """The bytes of Python's standard library, for training and held out (every tenth file).

    Args:
        limit: number of bytes for training.
    """
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    if len(files) < 10:
        raise ValueError(
            f"only {len(files)} files match {sysconfig.get_path('stdlib')}/*.py: no text to train on"
        )
    texts = [path.read_bytes() for path in files]
    held_out = b"".join(texts[::10])
    train = b"".join(text for i, text in enumerate(texts) if i % 10)
    return torch.frombuffer(bytearray(train[:limit]), dtype=torch.uint8), torch.frombuffer(
        bytearray(held_out[: limit // 10]), dtype=torch.uint8
    )


class Batches:
    """Random pieces of a text: bytes (N, T), and the next byte for each of them."""

    def __init__(self, text: Tensor, batch_size: int, context: int) -> None:
        if len(text) <= context:
            raise ValueError(
                f"a shard of {len(text)} bytes is shorter than --context {context}: raise --text-bytes"
            )
        self._text, self._batch_size, self._context = text, batch_size, context

    def __next__(self) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(self._text) - self._context, (self._batch_size, 1))
        pieces = self._text[starts + torch.arange(self._context + 1)].long()
        return pieces[:, :-1], pieces[:, 1:]


@torch.no_grad()
def bits_per_byte(net: nn.Module, text: Tensor, context: int) -> float:
    """The number of bits that the model needs for a byte of a held-out text."""
    pieces = text[: len(text) // (context + 1) * (context + 1)].view(-1, context + 1).long()
    total = 0.0
    for part in pieces.split(64):
        logits = net(part[:, :-1]).flatten(0, 1)
        total += F.cross_entropy(logits, part[:, 1:].flatten(), reduction="sum").item()
    return total / (pieces.shape[0] * context) / math.log(2)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--smoke", action="store_true", help="a tiny model and text, to check that the script runs")
    add("--steps", type=positive, default=600, help="steps of the job, each the average of a fragment")
    add("--overtime", type=int, default=100, help="further steps at the end while a group is missing")
    add("--sync-every", type=positive, default=20, help="inner steps in which each fragment is averaged once")
    add("--delay", type=int, default=1, help="inner steps that run while a fragment is being averaged")
    add(
        "--alpha",
        type=float,
        default=0.5,
        help="weight of a group's own parameters in the mean with the global ones",
    )
    add("--quantize", action="store_true", help="send 8 bits a parameter")
    add("--width", type=positive, default=96)
    add("--layers", type=positive, default=3, help="with embedding and head, --layers + 2 fragments")
    add("--context", type=positive, default=64, help="bytes from which the next one is predicted")
    add("--text-bytes", type=positive, default=4_000_000)
    add("--batch-size", type=positive, default=8, help="pieces of text per inner step")
    add("--lr", type=float, default=2e-3, help="learning rate of AdamW inside a group")
    add(
        "--outer-lr",
        type=float,
        default=0.7,
        help="learning rate of SGD with Nesterov momentum over the groups",
    )
    add("--seed", type=int, default=0, help="must be the same in all groups")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto")
    add(
        "--isolated",
        action="store_true",
        help="run the operations between the groups in a process of their own",
    )
    add("--threads", type=positive, default=1, help="CPU threads for the computation")
    add("--timeout", type=float, default=30, help="seconds that one step may wait for another group")
    add("--log-every", type=positive, default=50, help="in steps")
    add("--events", type=Path, metavar="DIR", help="write one JSON line a step, one file a rank")
    args = parser.parse_args()
    if args.smoke:
        args.width, args.layers, args.text_bytes, args.batch_size, args.sync_every = 32, 1, 100_000, 4, 6
    return args


if __name__ == "__main__":
    main()
