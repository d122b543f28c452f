"""Checks the node that it runs on; started by ``torchft doctor --node`` and ``torchft run --check`` as a
process of its own, since a broken device may crash or hang what asks it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from statistics import median

from torchft._lighthouse_http import tell_bad_node
from torchft._manager.settings import BAD_NODE_STATUS
from torchft._node import faults, figures, together
from torchft._node.verdict import NETWORK, NodeVerdict, Report, named
from torchft.addresses import node_name
from torchft.checkpointing.client.deadline import Deadline


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0, or 69 if this node should not train."""
    parser = argparse.ArgumentParser(prog="torchft._node.check")
    parser.add_argument("--lighthouse", default="")
    parser.add_argument("--job", required=True)
    parser.add_argument("--nodes", type=int, default=together.MOST_NODES)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(arguments)
    deadline = Deadline(args.seconds)
    report = Report(node_name())
    report.problems, report.unknown = faults.of_node()
    figures.measure(report, figures.devices(), _say, Deadline(deadline.left - together.NEEDED_SEC))
    verdict, number = NodeVerdict(), 0
    if args.lighthouse and args.nodes > 1:
        left = deadline.left
        try:
            verdict, number = together.compare(report, args.lighthouse, args.job, args.nodes, left, _say)
        except (together.NotCompared, ValueError) as error:
            report.unknown.append(f"this node is not compared with others: {error}")
    reasons = [*report.problems, *verdict.nodes.get(number, [])]
    if reasons and args.lighthouse:
        why = tell_bad_node(args.lighthouse, args.job, report.name, reasons)
        report.unknown += [why] if why else []
    if args.json:
        print(json.dumps({**asdict(report), "number": number, "compared": asdict(verdict)}))
    else:
        print("\n".join(lines(report, verdict, number)))
    return BAD_NODE_STATUS if reasons else 0


def lines(report: Report, verdict: NodeVerdict, number: int) -> list[str]:
    """What is shown of the check.

    Args:
        report: of this node.
        verdict: of the comparison.
        number: of this node in it.
    """
    good = [f"{name}: {median(values):.3g} {report.units[name]}" for name, values in report.figures.items()]
    if number in verdict.network:
        good.append(f"{NETWORK}: {verdict.network[number]:.3g} GB/s")
    if len(verdict.names) > 1:
        good.append(f"compared: {', '.join(named(node, verdict.names) for node in verdict.names)}")
    slow = [
        f"{named(node, verdict.names)} is slow: {reason}"
        for node, reasons in verdict.nodes.items()
        if node != number
        for reason in reasons
    ]
    return [
        f"node {report.name}",
        *(f"ok    {text}" for text in [*good, *report.notes]),
        *(f"warn  {text}" for text in [*report.unknown, *slow, *verdict.pairs]),
        *(f"BAD   {text}" for text in [*report.problems, *verdict.nodes.get(number, [])]),
    ]


def _say(what: str) -> None:
    print(f"{what} …", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
