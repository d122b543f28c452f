"""The delay of a survivor while a group joins with a model and Adam, with `heal_along` on and off.

One group trains; a second one joins and heals weights and Adam's state from it, at a limited rate. Each step
reduces the gradients of the whole model and computes for some time, as a GPU does: the processor is free, and
no step uses new memory (Adam is fused, and the memory of gradients is used again). The survivor's steps
between the join and the newcomer's first step as a participant are compared with its steps afterwards, when
both reduce as much. The longest of these, as a multiple of their median, is what the measurement itself
scatters by. On a virtual machine most of that is time in which the host runs others on its processors: the
table has the share, and the ratio of the steps in which it took at most 1 %. Without a limit of the rate,
which upstream does not have, upstream is measured in the same run. With `--device cuda` both models are on
one GPU, and with `--group nccl` they are also reduced there (NCCL 2.30 or later).

    python python/bench/heal_along.py --rounds 3
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from common import START_TIMEOUT_S, Side, Spread, Workers, markdown_table, rotated, start_groups, verdict
from processes import Job, ours_path
from upstream import REQUIREMENTS, install

ALONE_S = 2.0
SETTLE = 40  # steps in which both groups train afterwards
COMMAND_TIMEOUT_S = 540
GOAL = 1.1  # limit for the survivor's step times, as a multiple of its median step

Row = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what a survivor feels of a group that heals along.")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument(
        "--mb", type=int, default=1000, help="of weights and Adam's state; default: %(default)s"
    )
    parser.add_argument(
        "--rate", type=int, default=200, help="MB a second, 0: no limit; default: %(default)s"
    )
    parser.add_argument("--compute-ms", type=int, default=100, help="of a step; default: %(default)s")
    parser.add_argument("--upstream", choices=sorted(REQUIREMENTS), default="nightly")
    parser.add_argument(
        "--device", default="cpu", help="where the models of both groups are; default: %(default)s"
    )
    parser.add_argument("--group", choices=("gloo", "nccl"), default="gloo", help="default: %(default)s")
    parser.add_argument("--fsdp", action="store_true", help="groups of two ranks, sharded by FSDP2 (HSDP)")
    parser.add_argument("--busy", action="store_true", help="compute where the model is, in place of a pause")
    args = parser.parse_args()
    for name in ("rounds", "mb"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)}: allowed is 1 or more")
    for name in ("rate", "compute_ms"):
        if getattr(args, name) < 0:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: allowed is 0 or more")
    if args.group == "nccl" and args.device == "cpu":
        parser.error("--group nccl: reduces on a GPU only, with --device cuda")
    cases = list(OURS)
    if not args.rate:
        cases.append(Case("upstream", None, install(args.upstream)))
    rows: dict[str, list[Row]] = {case.name: [] for case in cases}
    for number in range(args.rounds):
        for case in rotated(cases, number):
            how = args.mb, args.rate, args.compute_ms, args.busy, args.device, args.group, args.fsdp
            join = measure(case, *how)
            rows[case.name].append(join.row())
            print(f"round {number + 1}/{args.rounds}, {case.name}: {rows[case.name][-1]}", flush=True)
    print(table(rows))


@dataclass(frozen=True)
class Case:
    """A package with its setting.

    Attributes:
        along: the value of ``heal_along``; None: the package has no such setting.
        path: the package's directory for PYTHONPATH; None: ours.
    """

    name: str
    along: Optional[bool]
    path: Optional[Path] = None


OURS = (Case("heal_along=False", False), Case("heal_along=True", True))


@dataclass(frozen=True)
class Join:
    """The steps of a survivor and of the group that joins: begin, end, and for how long the host ran others.

    Attributes:
        gradient_mb: of a step, in MB.
        began, joined: when the newcomer's first step began, and the first one that it took part in.
    """

    survivor: dict[str, Any]
    newcomer: dict[str, Any]
    gradient_mb: float

    @property
    def began(self) -> float:
        return float(self.newcomer["steps"][0][0])

    @property
    def joined(self) -> float:
        return float(self.newcomer["joined"])

    def row(self) -> Row:
        """The figures of the table."""
        last = self.newcomer["steps"][-2][1]
        # Both end a step at about the same time: its middle decides on which side of the join it is.
        during = [s for s in self.survivor["steps"] if self.began < s[1] and (s[0] + s[1]) / 2 <= self.joined]
        after = [s for s in self.survivor["steps"] if self.joined < s[0] and s[1] <= last]
        healing = sum(b <= self.joined for _, b, *_ in self.newcomer["steps"])
        median = Spread.of(_seconds(after)).median
        return {
            "median": 1000 * median,
            "longest": 1000 * max(_seconds(during)),
            "ratio": max(_seconds(during)) / median,
            "without": max(_seconds(after)) / median,
            "undisturbed": max(_seconds(_undisturbed(during))) / median,
            "undisturbed_without": max(_seconds(_undisturbed(after))) / median,
            "taken": _taken(during),
            "taken_without": _taken(after),
            "counts_s": self.joined - self.began,
            # The survivor's longer steps, and the newcomer's absence.
            "lost_s": sum(_seconds(during)) - median * len(during) + self.joined - self.began,
            "in_vain_mb": healing * self.gradient_mb,
            "newcomer_mb": self.newcomer["peak_mb"],
            "survivor_mb": self.survivor["peak_mb"],
        }


def _seconds(steps: list[list[float]]) -> list[float]:
    return [end - begin for begin, end, _ in steps]


def _undisturbed(steps: list[list[float]]) -> list[list[float]]:
    """Return the steps in which the host took at most 1 % of the processors' time; all, if there are none."""
    return [step for step in steps if step[2] <= 0.01 * (step[1] - step[0])] or steps


def _taken(steps: list[list[float]]) -> float:
    """Return the share of the processors' time that the host took in these steps, in percent."""
    return 100 * sum(taken for *_, taken in steps) / sum(_seconds(steps))


def measure(
    case: Case,
    mb: int,
    rate: int,
    compute_ms: int,
    busy: bool = False,
    device: str = "cpu",
    group: str = "gloo",
    fsdp: bool = False,
) -> Join:
    """One group trains, and another one joins; arguments as of the command."""
    side = Side(case.name, case.path or ours_path())
    with Job() as job:
        _, address = job.lighthouse(side.path, min_replicas=1, join_timeout_ms=500, heartbeat_timeout_ms=1000)
        ranks = 2 if fsdp else 1
        both = start_groups(job, side, 2, ranks).children
        survivor, newcomer = Workers(job, both[:ranks]), Workers(job, both[ranks:])
        how: dict[str, Any] = {"lighthouse": address, "along": case.along, "rate": rate}
        how |= {"compute_ms": compute_ms, "busy": busy, "kind": group}
        for number, workers in enumerate((survivor, newcomer)):
            model: dict[str, Any] = {"mb": mb, "fused": True, "device": device, "sharded": fsdp}
            workers.do(START_TIMEOUT_S, do="adam", trained=number == 0, **model)
        child = survivor.children[0]
        for rank in survivor.children:
            rank.send(do="train_along", settle=0, **how)
        job.wait(lambda: child.of("training"), COMMAND_TIMEOUT_S, "the survivor trains")
        time.sleep(ALONE_S)
        theirs = newcomer.do(COMMAND_TIMEOUT_S, do="train_along", settle=SETTLE, **how)[0]
        for rank in survivor.children:
            rank.send(do="stop")
        newcomer.do(COMMAND_TIMEOUT_S, do="leave")
        job.wait(lambda: child.of("train_along"), COMMAND_TIMEOUT_S, "the survivor stops")
        return Join(child.of("train_along")[-1], theirs, mb / 3 / ranks)


def table(rows: dict[str, list[Row]]) -> str:
    """Return the result as Markdown."""
    lines = []
    for name, mine in rows.items():
        figures = {key: Spread.of(row[key] for row in mine) for key in mine[0]}
        goal = (
            f" (goal <= {GOAL:g}: {verdict(figures['ratio'].median <= GOAL)})"
            if name == "heal_along=True"
            else ""
        )
        lines.append(
            [
                name,
                figures["median"].text(0),
                figures["longest"].text(0),
                figures["ratio"].text(2) + goal,
                figures["without"].text(2),
                f"{figures['undisturbed'].text(2)}, {figures['undisturbed_without'].text(2)}",
                f"{figures['taken'].text(1)}, {figures['taken_without'].text(1)}",
                figures["counts_s"].text(1),
                figures["lost_s"].text(1),
                figures["in_vain_mb"].text(0),
                figures["newcomer_mb"].text(0),
                figures["survivor_mb"].text(0),
            ]
        )
    head = [
        "package",
        "survivor's median step together, ms",
        "longest while the other heals, ms",
        "ratio",
        "ratio without a heal",
        "ratio of the steps in which the host took at most 1 % (of all if there are none), with and without "
        "a heal",
        "taken by the host with and without a heal, %",
        "until the newcomer counts, s",
        "group-seconds lost",
        "gradients that the newcomer reduced in vain, MB",
        "newcomer's memory grows by, MB",
        "survivor's, MB",
    ]
    return markdown_table(head, lines)


if __name__ == "__main__":
    main()
