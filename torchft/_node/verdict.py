"""Which node is slow, and which connection, from the figures of all nodes.

All figures are rates: higher is better. Each is a list of repetitions.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Optional, TypeVar

# A node is slow if the median of the others' rates is at least so many times its own, ...
_SLOW_RATIO = 1.2
# ... and the difference is at least so many times what chance explains: the scatter of its own repetitions,
# and that of the other nodes.
_CERTAIN = 4.0
# The standard deviation of a normal distribution, as a multiple of its median absolute deviation; and the
# standard error of a median, as a multiple of that of a mean.
_DEVIATION, _OF_MEDIAN = 1.4826, 1.2533
NETWORK = "network"

Pair = tuple[int, int]
Key = TypeVar("Key", bound=Hashable)


@dataclass
class Report:
    """What a node knows of itself.

    Attributes:
        name: of the host.
        figures: repetitions of each rate, by its name.
        units: of each rate.
        problems: why this node should not train.
        unknown: what could not be found out, and why.
        notes: the state of the host: its load, clock, temperature.
    """

    name: str
    figures: dict[str, list[float]] = field(default_factory=dict)
    units: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass
class NodeVerdict:
    """What the comparison of all nodes says.

    Attributes:
        names: of the nodes, by their numbers.
        nodes: why a node is slow, for each that is, by its number.
        pairs: connections that are bad although both nodes have good ones to others, or of which it is not
            known which node is at fault.
        network: the rate of each node's best connection in GB/s, by its number.
    """

    names: dict[int, str] = field(default_factory=dict)
    nodes: dict[int, list[str]] = field(default_factory=dict)
    pairs: list[str] = field(default_factory=list)
    network: dict[int, float] = field(default_factory=dict)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> NodeVerdict:
        """The verdict of which ``value`` was made by JSON, which turns numbers of keys into text."""
        names, nodes, network = (
            {int(node): of for node, of in value[part].items()} for part in ("names", "nodes", "network")
        )
        return cls(names, nodes, list(value["pairs"]), network)


def named(node: int, names: Mapping[int, str]) -> str:
    """A node in a message: two may run on one host."""
    return f"node {names[node]} ({node})"


def ratio_if_slow(own: Sequence[float], others: Sequence[Sequence[float]]) -> Optional[float]:
    """How many times faster the others are, if this is more than chance explains; else None.

    Args:
        own: the repetitions of one; empty, or all 0: it failed.
        others: those of each other one.
    """
    usual = [median(other) for other in others if other]
    if not usual:
        return None
    mine, middle = median(own or [0.0]), median(usual)
    scatter = _DEVIATION * median(abs(one - middle) for one in usual)
    errors = [_error(other) for other in others if other]
    chance = math.hypot(_error(own), median(errors), scatter)
    if middle < _SLOW_RATIO * mine or middle - mine < _CERTAIN * chance or middle == 0:
        return None
    return middle / mine if mine else math.inf


def _error(values: Sequence[float]) -> float:
    """The standard error of the median of some values."""
    if len(values) < 2:
        return 0.0
    middle = median(values)
    deviation = _DEVIATION * median(abs(value - middle) for value in values)
    return _OF_MEDIAN * deviation / math.sqrt(len(values))


def slow(figure: str, rates: Mapping[Key, Sequence[float]], others: str) -> dict[Key, str]:
    """Which of several are slow, and why.

    Args:
        figure: the name of the rate.
        rates: the repetitions of each.
        others: what the others are, for the reason.
    """
    found = {}
    for key, own in rates.items():
        ratio = ratio_if_slow(own, [other for name, other in rates.items() if name != key])
        if ratio is not None:
            found[key] = f"{figure}: the median of the other {others} is " + (
                "above 0, and its own is 0" if math.isinf(ratio) else f"{ratio:.2f} times its own"
            )
    return found


def neighbors(nodes: Sequence[int]) -> list[Pair]:
    """The pairs of the first round. Each node works through those with it in this order, so with an odd
    number of nodes the first one measures twice, the second time with the last one.
    """
    pairs = [(nodes[i], nodes[i + 1]) for i in range(0, len(nodes) - 1, 2)]
    return [*pairs, (nodes[-1], nodes[0])] if len(nodes) % 2 and len(nodes) > 1 else pairs


def fastest_with_slowest(nodes: Sequence[int], measured: Mapping[Pair, Sequence[float]]) -> list[Pair]:
    """The pairs of the second round: each node, the slowest first, with the fastest that it was not measured
    with. So the good node of a bad pair gets a good connection, and the bad one does not.
    """
    rates = best_of(nodes, measured)
    order = sorted(nodes, key=lambda node: (median(rates[node] or [0.0]), node))
    known = {frozenset(pair) for pair in measured}
    uses, pairs = dict.fromkeys(order, 0), []
    for node in order:
        if uses[node]:
            continue
        # Fastest first; one that has a partner measures a second time where no other is left.
        fit = [other for most in (0, 1) for other in reversed(order) if uses[other] == most and other != node]
        other = next((other for other in fit if frozenset((node, other)) not in known), None)
        if other is not None:
            pairs.append((node, other))
            known.add(frozenset((node, other)))
            uses[node] += 1
            uses[other] += 1
    return pairs


def best_of(nodes: Sequence[int], measured: Mapping[Pair, Sequence[float]]) -> dict[int, Sequence[float]]:
    """The rates of each node's best connection; empty for one without."""
    best: dict[int, Sequence[float]] = {node: [] for node in nodes}
    for pair, rates in measured.items():
        for node in pair:
            if median(rates or [0.0]) >= median(best[node] or [0.0]):
                best[node] = rates
    return best


def judge(reports: Mapping[int, Report], measured: Mapping[Pair, Sequence[float]]) -> NodeVerdict:
    """Compares the nodes of a job.

    Args:
        reports: of each node, by its number.
        measured: the rates of each pair of both rounds; empty: nothing could be exchanged.
    """
    slow_nodes: dict[int, list[str]] = {}
    for figure in sorted({name for report in reports.values() for name in report.figures}):
        rates = {node: report.figures[figure] for node, report in reports.items() if figure in report.figures}
        reasons = slow(figure, rates, "nodes")
        if 2 * len(rates) >= len(reports):  # a device that is not found, for example
            lacking = f"{figure}: not measured here, but on most nodes"
            reasons.update({node: lacking for node in reports if node not in rates})
        for node, reason in reasons.items():
            slow_nodes.setdefault(node, []).append(reason)
    # One pair alone has nothing to be compared with.
    best = best_of(list(reports), measured)
    of_network = slow(NETWORK, best, "nodes") if len(measured) > 1 else {}
    for node, reason in of_network.items():
        slow_nodes.setdefault(node, []).append(reason)
    slow_pairs = slow("connection", measured, "pairs")
    names = {node: report.name for node, report in reports.items()}
    pairs = []
    for pair, rates in measured.items():
        a, b = (named(node, names) for node in pair)
        if of_network.keys() & set(pair):
            continue
        if not rates:
            pairs.append(f"{a} and {b} cannot exchange data")
        elif pair in slow_pairs:
            pairs.append(f"{a} and {b}: {slow_pairs[pair]}")
    return NodeVerdict(
        names, slow_nodes, pairs, {node: median(rates) for node, rates in best.items() if rates}
    )
