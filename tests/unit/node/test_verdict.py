"""Which node is slow, and which of a bad pair: tables, and a model of clusters."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from math import inf
from typing import Optional

import pytest

from torchft._node.verdict import (
    NodeVerdict,
    Pair,
    Report,
    fastest_with_slowest,
    judge,
    neighbors,
    ratio_if_slow,
    slow,
)

STEADY = [100.0, 101.0, 99.0]


@pytest.mark.parametrize(
    ("own", "others", "ratio"),
    [
        pytest.param([50.0, 50.0, 50.0], [STEADY] * 3, 2.0, id="half as fast"),
        pytest.param([50.0, 50.0, 50.0], [STEADY], 2.0, id="of two the slower one"),
        pytest.param([90.0, 90.0, 90.0], [STEADY] * 3, None, id="less than a fifth faster"),
        pytest.param([80.0, 20.0, 140.0], [[100.0]] * 3, None, id="its repetitions scatter"),
        pytest.param([80.0] * 3, [[95.0], [100.0], [130.0]], None, id="the others scatter"),
        pytest.param([200.0] * 3, [STEADY] * 3, None, id="faster"),
        pytest.param([], [STEADY] * 3, inf, id="it failed"),
        pytest.param([0.0], [[0.0], [0.0]], None, id="all failed"),
        pytest.param([], [[], []], None, id="nothing was measured"),
        pytest.param(STEADY, [], None, id="alone"),
        pytest.param([50.0] * 3, [STEADY, STEADY, [51.0] * 3], 2.0, id="two of four: the median is between"),
    ],
)
def test_one_against_the_others(own: list[float], others: list[list[float]], ratio: Optional[float]) -> None:
    found = ratio_if_slow(own, others)
    assert found is None if ratio is None else found == pytest.approx(ratio, rel=0.01)


def test_no_node_is_named_for_chance_and_a_slow_one_always() -> None:
    choose = random.Random(0)

    def rates(speed: float) -> list[float]:
        return [speed * choose.gauss(1, 0.05) for _ in range(9)]

    found = 0
    for _ in range(500):
        nodes = {node: rates(choose.gauss(100, 3)) for node in range(choose.randint(2, 12))}
        assert slow("memory", nodes, "nodes") == {}
        nodes[len(nodes)] = rates(100 / 1.5)
        named = slow("memory", nodes, "nodes")
        assert named.keys() <= {len(nodes) - 1}
        found += len(named)
    assert found >= 495


def test_what_the_reasons_say() -> None:
    rates = {"cuda:0": [100.0], "cuda:1": [100.0], "cuda:2": [50.0], "cuda:3": [0.0]}
    assert slow("memory", rates, "devices") == {
        "cuda:2": "memory: the median of the other devices is 2.00 times its own",
        "cuda:3": "memory: the median of the other devices is above 0, and its own is 0",
    }


@pytest.mark.parametrize(
    ("nodes", "pairs"),
    [
        ([], []),
        ([0], []),
        ([0, 1], [(0, 1)]),
        ([0, 1, 2], [(0, 1), (2, 0)]),
        ([0, 2, 3, 5], [(0, 2), (3, 5)]),
    ],
)
def test_neighbors(nodes: list[int], pairs: list[Pair]) -> None:
    assert neighbors(nodes) == pairs


@pytest.mark.parametrize(
    ("measured", "pairs"),
    [
        ({}, []),
        ({(0, 1): [5.0]}, []),
        ({(0, 1): [1.0], (2, 3): [5.0]}, [(0, 3), (1, 2)]),
        ({(0, 1): [5.0], (2, 3): []}, [(2, 1), (3, 0)]),
        ({(0, 1): [1.0], (2, 0): [5.0]}, [(1, 2)]),
    ],
)
def test_the_slowest_measure_with_the_fastest(measured: dict[Pair, list[float]], pairs: list[Pair]) -> None:
    nodes = sorted({node for pair in measured for node in pair})
    assert fastest_with_slowest(nodes, measured) == pairs


def both_rounds(count: int, rate: Callable[[Pair], list[float]]) -> dict[Pair, list[float]]:
    nodes = list(range(count))
    measured = {pair: rate(pair) for pair in neighbors(nodes)}
    second = fastest_with_slowest(nodes, measured)
    assert not {frozenset(pair) for pair in second} & {frozenset(pair) for pair in measured}
    for pairs in (list(measured), second):
        assert max(Counter(node for pair in pairs for node in pair).values(), default=0) <= 2
    return measured | {pair: rate(pair) for pair in second}


def reports(count: int) -> dict[int, Report]:
    return {node: Report(f"host{node}") for node in range(count)}


@pytest.mark.parametrize("of_it", [0.0, 3.0])
@pytest.mark.parametrize("count", range(3, 12))
def test_the_bad_node_of_a_bad_pair_is_named(count: int, of_it: float) -> None:
    choose = random.Random(count)
    for bad in range(count):

        def rate(pair: Pair, bad: int = bad) -> list[float]:
            speed = of_it if bad in pair else 10.0
            return [speed * choose.gauss(1, 0.03) for _ in range(7)] if speed else []

        verdict = judge(reports(count), both_rounds(count, rate))
        assert list(verdict.nodes) == [bad] and verdict.pairs == []
        assert verdict.nodes[bad][0].startswith("network: ")


@pytest.mark.parametrize("count", [3, 4, 7, 8])
@pytest.mark.parametrize(("rates", "why"), [([3.0] * 7, "connection: "), ([], "cannot exchange data")])
def test_a_bad_connection_of_two_good_nodes_names_neither(count: int, rates: list[float], why: str) -> None:
    verdict = judge(reports(count), both_rounds(count, lambda pair: rates if pair == (0, 1) else [10.0] * 7))
    assert verdict.nodes == {}
    (said,) = verdict.pairs
    assert said.startswith("node host0 (0) and node host1 (1)") and why in said


def test_of_two_nodes_without_a_connection_it_is_not_known_which_is_bad() -> None:
    verdict = judge(reports(2), {(0, 1): []})
    assert verdict.nodes == {} and len(verdict.pairs) == 1
    assert judge(reports(2), {(0, 1): [0.001]}).nodes == {}
    assert judge(reports(1), {}) == NodeVerdict({0: "host0"})


@pytest.mark.parametrize(("having", "lacking"), [(0, 4), (1, 0), (2, 2), (3, 1), (4, 0)])
def test_a_figure_that_a_node_lacks(having: int, lacking: int) -> None:
    of = reports(4)
    for node in range(having):
        of[node].figures = {"device": [7.0] * 9}
    assert len(judge(of, {}).nodes) == (lacking if having else 0)


def test_the_best_connection_of_each_node_is_shown() -> None:
    verdict = judge(reports(3), {(0, 1): [1.0, 3.0, 2.0], (2, 0): [9.0], (1, 2): []})
    assert verdict.network == {0: 9.0, 1: 2.0, 2: 9.0}
    assert NodeVerdict.from_json(json.loads(json.dumps(asdict(verdict)))) == verdict


def test_a_slow_node_is_named_for_each_of_its_figures() -> None:
    of = reports(3)
    for node, report in of.items():
        report.figures = {"memory": [10.0 if node else 5.0] * 9, "device": [7.0] * 9}
    of[2].figures.pop("device")  # the driver does not find it
    verdict = judge(of, {})
    assert verdict.nodes == {
        0: ["memory: the median of the other nodes is 2.00 times its own"],
        2: ["device: not measured here, but on most nodes"],
    }
    assert NodeVerdict.from_json(json.loads(json.dumps(asdict(verdict)))) == verdict
