"""The output of the check of a node, and its status."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from torchft._lighthouse_http import HttpLighthouse
from torchft._node import check, faults, figures, together
from torchft._node.verdict import NodeVerdict, Report
from torchft.cli.status import table
from torchft.coordination import LighthouseServer

COMPARED = NodeVerdict(
    {0: "a", 1: "b", 2: "here"},
    {1: ["memory: slow"]},
    ["node a (0) and node here (2) cannot exchange data"],
    {1: 2.5, 2: 2.5},
)


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(report: Report, *_: object) -> None:
        report.figures, report.units = {"processor: memory": [3.0, 4.0, 5.0]}, {"processor: memory": "GB/s"}
        report.notes.append("cpu: load 0.1 on 2 processors")

    monkeypatch.setenv("TORCHFT_NODE_NAME", "here")
    monkeypatch.setattr(figures, "measure", measure)
    monkeypatch.setattr(faults, "of_node", lambda: ([], ["the kernel log cannot be read: why"]))


def comparing(monkeypatch: pytest.MonkeyPatch, answer: Callable[[], tuple[NodeVerdict, int]]) -> None:
    monkeypatch.setattr(together, "compare", lambda *_: answer())


ARGUMENTS = ["--job", "job", "--seconds", "100"]
WITH_OTHERS = [*ARGUMENTS, "--lighthouse", "http://there:29510"]
ALONE = """\
node here
ok    processor: memory: 4 GB/s
ok    cpu: load 0.1 on 2 processors
warn  the kernel log cannot be read: why
"""


def test_a_node_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main(ARGUMENTS) == 0
    assert capsys.readouterr().out == ALONE


def test_a_node_with_a_problem(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "of_node", lambda: (["XID 79"], []))
    assert check.main(ARGUMENTS) == 69
    assert capsys.readouterr().out.endswith("BAD   XID 79\n")


def test_a_bad_node_is_an_event_of_the_job(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes that are one job alone are not compared: there is nothing to wait for."""
    monkeypatch.setattr(faults, "of_node", lambda: (["XID 79"], []))
    lighthouse = LighthouseServer("127.0.0.1:0", min_replicas=1)
    try:
        address = lighthouse.address()
        alone = ["--nodes", "1", "--lighthouse", address]
        assert check.main(["--job", "default", "--seconds", "100", *alone]) == 69
        assert "warn  this" not in capsys.readouterr().out
        status = HttpLighthouse(address).get("/status")
        assert "bad_node  node here should not train: XID 79\n" in table(status)
        assert check.main([*ARGUMENTS, *alone]) == 69
        assert "warn  this is no event of the job: " in capsys.readouterr().out
    finally:
        lighthouse.shutdown()


@pytest.mark.parametrize(
    ("number", "status", "of_b"),
    [(2, 0, "warn  node b (1) is slow: memory: slow"), (1, 69, "BAD   memory: slow")],
)
def test_a_node_among_others(
    number: int,
    status: int,
    of_b: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(check, "tell_bad_node", lambda *_: "")
    comparing(monkeypatch, lambda: (COMPARED, number))
    assert check.main(WITH_OTHERS) == status
    shown = capsys.readouterr().out.splitlines()
    assert "ok    network: 2.5 GB/s" in shown
    assert "ok    compared: node a (0), node b (1), node here (2)" in shown
    assert of_b in shown and "warn  node a (0) and node here (2) cannot exchange data" in shown


def test_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "tell_bad_node", lambda *_: "")
    comparing(monkeypatch, lambda: (COMPARED, 1))
    assert check.main([*WITH_OTHERS, "--json"]) == 69
    shown = json.loads(capsys.readouterr().out)
    assert shown["name"] == "here" and shown["number"] == 1 and shown["problems"] == []
    assert shown["figures"] == {"processor: memory": [3.0, 4.0, 5.0]}
    assert shown["compared"]["nodes"] == {"1": ["memory: slow"]}


@pytest.mark.parametrize("error", [together.NotCompared("no lighthouse"), ValueError("no lighthouse")])
def test_nodes_that_do_not_meet(
    error: Exception, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> tuple[NodeVerdict, int]:
        raise error

    comparing(monkeypatch, fails)
    assert check.main(WITH_OTHERS) == 0
    assert "warn  this node is not compared with others: no lighthouse" in capsys.readouterr().out
