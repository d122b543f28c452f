"""``torchft scale``: another number of replica groups, given, or found by the speed of the job."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from torchft._lighthouse_http import Unanswered
from torchft.cli.arguments import Parser, ask_of, replicas
from torchft.launch import control
from torchft.scaling import Kubernetes, Scaler, ScalerError, Slurm, follow

_ABOUT = """\
Adds groups to a job, or drains its last ones. With a range it finds the number of groups that is best, until
the job has ended: it adds one while each added group brings 60 % of its share of the speed.

  torchft scale 4                                   # of `torchft run` on this machine
  torchft scale auto                                # the same, of --scale auto after a number
  torchft scale 2:8 --kubernetes torchft-groups
  torchft scale 2:8 --slurm groups.sbatch train_ddp.py --steps 20000
"""


def main(arguments: Sequence[str]) -> int:
    parser = Parser(prog="torchft scale", description=_ABOUT)
    parser.add_argument(
        "replicas", type=_number, metavar="N|MIN:MAX|auto", help="number of groups, or the range of it"
    )
    parser.add_argument(
        "--pid", type=int, help="process id of the job's `torchft run`; needed if several run"
    )
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--kubernetes", metavar="[NAMESPACE/]JOB", help="the groups are an indexed Job")
    place.add_argument(
        "--slurm",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT ...",
        help="the groups are tasks of arrays; sbatch gets this script and its arguments for further ones",
    )
    parser.add_argument("--name", default="torchft-group", help="name of these arrays (torchft-group)")
    parser.add_argument(
        "--sizes", default="all", help="numbers within the range: all, powers_of_two, or a list such as 2/4/8"
    )
    ask_of(parser)
    args = parser.parse_args(arguments)
    if args.slurm is not None and not args.slurm:
        parser.error("--slurm needs the script of the tasks")
    scaler = _scaler(args)
    if scaler is None and isinstance(args.replicas, tuple):
        parser.error(
            "a range needs --kubernetes or --slurm; a job of `torchft run` takes it at its start: --replicas "
            "MIN:MAX --scale auto"
        )
    if scaler is not None and args.replicas == control.AUTO:
        parser.error("auto is not allowed with --kubernetes and --slurm; allowed: N or MIN:MAX")
    try:
        if scaler is None:
            print(control.scale(args.replicas, args.pid))
        elif isinstance(args.replicas, int):
            scaler.set(args.replicas)
            print(f"{args.replicas} replica groups")
        else:
            least, most = args.replicas
            follow(scaler, least, most, args.sizes, lighthouse=args.lighthouse, job=args.job)
    except (ValueError, OSError, ScalerError, Unanswered) as e:
        print(f"torchft scale: {e}", file=sys.stderr)
        return 1
    return 0


def _scaler(args: argparse.Namespace) -> Scaler | None:
    if args.kubernetes:
        return Kubernetes(args.kubernetes)
    if args.slurm:
        most = args.replicas[1] if isinstance(args.replicas, tuple) else None
        return Slurm(args.slurm, most, args.name)
    return None


def _number(text: str) -> int | tuple[int, int] | str:
    if text == control.AUTO:
        return text
    try:
        least, most = replicas(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not allowed; allowed: a whole number of at least 1, MIN:MAX with MAX not below "
            "MIN, or auto"
        ) from None
    return (least, most) if ":" in text else least
