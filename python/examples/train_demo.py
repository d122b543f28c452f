"""train_ddp.py for `make train`: records its steps, and waits for missing groups at the end.

It takes the options of train_ddp.py, and these:
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

import torchft  # noqa: E402
import train_ddp  # noqa: E402
from python.examples.parts import Events, evaluate, int_from_env, load_images, sha256_of  # noqa: E402
from torchft.data import ElasticDataLoader  # noqa: E402
from torchft.data.position import DataPosition  # noqa: E402

LAST = 0.75  # the share of the steps after which groups wait for missing ones
PAUSE_SEC = 1.0


def main() -> None:
    options, rest = parse_args()
    sys.argv = [sys.argv[0], *rest]
    args = train_ddp.parse_args()
    use(options)
    group, rank = int_from_env("REPLICA_GROUP_ID"), int_from_env("RANK")
    events = Events(options.events, group, rank)
    watch = Watch(events, args.steps, int_from_env("NUM_REPLICA_GROUPS"))
    train_ddp.ElasticDataLoader = watch.loader  # type: ignore[misc]
    train_ddp.Optimizer = watch.optimizer  # type: ignore[misc, assignment]
    train_ddp.criterion.register_forward_hook(lambda _module, _given, loss: watch.loss(loss))

    net = train_ddp.main(args)
    device = next(net.parameters()).device
    accuracy = evaluate(net, load_images(options.data, options.data_dir)[1], device)
    if options.events:
        torch.save(net.state_dict(), options.events / f"group-{group}-rank-{rank}.pt")
    events.write("end", step=watch.step(), accuracy=accuracy, sha256=sha256_of(net))


def use(options: argparse.Namespace) -> None:
    """Sets the images, and the type of all numbers."""
    if options.double:
        torch.set_default_dtype(torch.float64)
    if options.data != "digits":
        images = load_images(options.data, options.data_dir)
        train_ddp.load_images = lambda held_out=False: torch.utils.data.TensorDataset(
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
        self._position = DataPosition()
        self._indices: list[int] = []
        self._losses: list[float] = []
        self._started = False
        self.loader, self.optimizer = self._classes()

    def step(self) -> int:
        return self._manager.current_step()

    def loss(self, loss: torch.Tensor) -> None:
        self._losses.append(loss.item())

    def begins(self, manager: Any, position: DataPosition, participants: int) -> None:
        self._manager, self._position = manager, position
        self._indices, self._losses = [], []
        if not self._started:
            self._started = True
            self._events.write("start", step=manager.current_step(), pid=os.getpid())
        if participants < self._groups and manager.current_step() >= self._slow_from:
            time.sleep(PAUSE_SEC)  # so that a returning group finds a source to heal from

    def reads(self, unit: Any) -> None:
        if unit.repeated:
            return
        self._indices += unit.indices if unit.weight else ()
        if unit.last:
            manager = self._manager
            manager.wait_quorum()
            step, quorum = manager.current_step(), manager._quorum_id
            self._events.write("trained", step=step, quorum=quorum, indices=self._indices, **self._where())

    def ends(self, step: Any) -> None:
        manager, number = self._manager, self._manager.current_step()
        manager.wait_quorum()
        quorum, participants, healing = (
            manager._quorum_id,
            manager.num_participants(),
            not manager.is_participating(),
        )
        step()
        committed = manager.current_step() > number
        self._events.write(
            "commit" if committed else "lost",
            step=manager.current_step(),
            quorum=quorum,
            participants=participants,
            healing=healing,
            loss=sum(self._losses) / len(self._losses),
            recovery=manager.recovery_seconds() if healing else None,
            **self._where(),
        )

    def _where(self) -> dict[str, int]:
        return {"epoch": self._position.epoch, "batch": self._position.batch}

    def _classes(self) -> tuple[type, type]:
        watch = self

        class Loader(ElasticDataLoader):
            def __next__(self) -> Any:
                step = super().__next__()
                watch.begins(self._manager, step.position, step.participants)
                return step

            def _read(self, *of: Any) -> Any:  # type: ignore[override]
                unit = super()._read(*of)
                watch.reads(unit)
                return unit

        class Optimizer(torchft.Optimizer):
            def step(self, closure: object = None, **kwargs: Any) -> Any:
                watch.ends(super().step)

        return Loader, Optimizer


def parse_args() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, add_help=False)
    add = parser.add_argument
    add(
        "--events",
        type=Path,
        metavar="DIR",
        help="write JSON lines, one file per rank, and the weights at the end",
    )
    add("--double", action="store_true", help="compute in float64")
    add("--data", choices=["digits", "cifar10"], default="digits", help="digits ships with scikit-learn")
    add("--data-dir", type=Path, help="where cifar-10-batches-py lies")
    if {"-h", "--help"} & set(sys.argv):
        print(parser.format_help())
    return parser.parse_known_args()


if __name__ == "__main__":
    main()
