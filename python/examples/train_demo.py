"""A training script for `make train`: records its steps, and waits for missing groups at the end.

It takes the options of the script, and these:
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

import torchft.job  # noqa: E402
from python.examples.parts import (  # noqa: E402
    Events,
    bits_per_byte,
    evaluate,
    int_from_env,
    load_images,
    sha256_of,
)
from torchft.data import ElasticDataLoader  # noqa: E402
from torchft.data.position import DataPosition  # noqa: E402

LAST = 0.75  # the share of the steps after which groups wait for missing ones
PAUSE_SEC = 1.0


def main() -> None:
    options, rest = parse_args()
    sys.argv = [f"{options.script}.py", *rest]  # the job has its name
    script = import_module(options.script)
    args = script.parse_args()
    use(options)
    group, rank = int_from_env("REPLICA_GROUP_ID"), int_from_env("RANK")
    events = Events(options.events, group, rank)
    watch = Watch(events, args.steps, int_from_env("NUM_REPLICA_GROUPS"))
    watch.install()

    net = script.main(args)
    device = next(net.parameters()).device
    if options.script == "train_diloco":
        text = script.standard_library(args.text_bytes)[1].to(device)
        result = {"bits_per_byte": bits_per_byte(net, text, args.context)}
    else:
        result = {"accuracy": evaluate(net, load_images(options.data, options.data_dir)[1], device)}
    if options.events and options.script == "train_ddp":
        torch.save(net.state_dict(), options.events / f"group-{group}-rank-{rank}.pt")
    events.write("end", step=watch.step(), sha256=sha256_of(net), **result)


def use(options: argparse.Namespace) -> None:
    """Sets the images, and the type of all numbers."""
    if options.double:
        torch.set_default_dtype(torch.float64)
    if options.data != "digits":
        images = load_images(options.data, options.data_dir)
        script: Any = import_module(options.script)
        script.load_images = lambda held_out=False: torch.utils.data.TensorDataset(
            *images[held_out].tensors[:2]
        )


class Watch:
    """Records for each step its samples, the number of groups, and whether it was committed.

    | event | fields besides `time` |
    |---|---|
    | `start` | `step` that it starts from, `pid` |
    | `trained` | `step`, `quorum`, `epoch`, `batch`, `indices` of the images that count |
    | `commit`, `lost` | `step` after it, `quorum`, `epoch`, `batch`, `participants`, `loss`; and see below |
    | `end` | `step`, `accuracy`, `sha256` of the weights |

    `commit` and `lost` also have `healing`, and `recovery`: the duration of each phase of a heal in seconds.
    `trained` is written before the backward pass of the last unit, in which the gradients are reduced. So the
    samples of a rank that is killed later in the step are known; they count if the others committed that step
    in that quorum.
    """

    def __init__(self, events: Events, steps: int, groups: int) -> None:
        self._events, self._groups = events, groups
        self._slow_from = LAST * steps
        self._manager: Any = None
        self._averages = False  # whether a step of the job is an average (DiLoCo)
        self._healed = False
        self._position = DataPosition()
        self._indices: list[int] = []
        self._losses: list[float] = []
        self._started = False

    def step(self) -> int:
        return self._manager.current_step()

    def begins(self, manager: Any, step: Any) -> None:
        self._manager, self._position, participants = manager, step.position, step.participants
        if not self._averages:
            self._losses = []
            if not step.again:  # else the gradients of this rank's earlier units are kept
                self._indices = []
        if not self._started:
            self._started = True
            self._events.write("start", step=manager.current_step(), pid=os.getpid())
            self._averages = manager._data.averages_weights
            if self._averages:
                manager.register_commit_hook(self._averaged)
        if participants < self._groups and manager.current_step() >= self._slow_from:
            time.sleep(PAUSE_SEC)  # so that a returning group finds a source to heal from

    def reads(self, unit: Any) -> None:
        if unit.repeated or self._averages:
            return
        self._indices += unit.indices if unit.weight else ()
        if unit.last:
            manager = self._manager
            manager.wait_quorum()
            step, quorum = manager.current_step(), manager._quorum_id
            self._events.write("trained", step=step, quorum=quorum, indices=self._indices, **self._where())

    def ends(self, commit: Callable[[], bool]) -> bool:
        if self._averages:
            return commit()
        manager = self._manager
        manager.wait_quorum()
        quorum, participants, healing = (
            manager._quorum_id,
            manager.num_participants(),
            not manager.is_participating(),
        )
        committed = commit()
        self._decided(committed, participants, healing, quorum=quorum, **self._where())
        return committed

    def _averaged(self, step: int, committed: bool, participants: int) -> None:
        self._decided(committed, participants, self._healed, step=step + committed)
        self._losses = []
        self._healed = self._healed and not committed

    def _decided(self, committed: bool, participants: int, healing: bool, **fields: Any) -> None:
        losses = self._losses or [0.0]
        self._events.write(
            "commit" if committed else "lost",
            **{"step": self.step(), **fields},
            participants=participants,
            healing=healing,
            loss=sum(losses) / len(losses),
            recovery=self._manager.recovery_seconds() if healing else None,
        )

    def _where(self) -> dict[str, int]:
        return {"epoch": self._position.epoch, "batch": self._position.batch}

    def install(self) -> None:
        """Replaces classes of torchft.job."""
        watch, load = self, torchft.job.Job._load_state

        class Loader(ElasticDataLoader):
            def __next__(self) -> Any:
                step = super().__next__()
                watch.begins(self._manager, step)
                return step

            def _read(self, *of: Any) -> Any:  # type: ignore[override]
                unit = super()._read(*of)
                watch.reads(unit)
                return unit

        class Step(torchft.job.JobStep):
            def backward(self, loss: torch.Tensor) -> None:
                watch._losses.append(loss.item())
                super().backward(loss)

            def commit(self) -> bool:
                return watch.ends(super().commit)

        def heals(job: Any, state: dict[str, Any]) -> None:
            load(job, state)
            watch._healed = True

        torchft.job.ElasticDataLoader = Loader  # type: ignore[misc]
        torchft.job.JobStep = Step  # type: ignore[misc]
        torchft.job.Job._load_state = heals  # type: ignore[method-assign]


def parse_args() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, add_help=False)
    add = parser.add_argument
    add(
        "--events",
        type=Path,
        metavar="DIR",
        help="write JSON lines, one file per rank, and the weights at the end",
    )
    add("--script", choices=["train_ddp", "train_fsdp", "train_diloco"], default="train_ddp")
    add("--double", action="store_true", help="compute in float64")
    add("--data", choices=["digits", "cifar10"], default="digits", help="digits ships with scikit-learn")
    add("--data-dir", type=Path, help="where cifar-10-batches-py lies")
    if {"-h", "--help"} & set(sys.argv):
        print(parser.format_help())
    return parser.parse_known_args()


if __name__ == "__main__":
    main()
