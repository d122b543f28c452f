"""Nodes in threads meet at a real lighthouse, and name the slow one."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from torchft._node import together
from torchft._node.together import NotCompared, compare
from torchft._node.verdict import NodeVerdict, Report
from torchft.checkpointing.client.deadline import Deadline
from torchft.coordination import LighthouseServer

STEADY = [100.0] * 9


@pytest.fixture
def lighthouse() -> Iterator[str]:
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1)
    yield server.address()
    server.shutdown()


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHFT_HOST", "127.0.0.1")


def meet(
    lighthouse: str,
    names: list[str],
    figures: Callable[[str], dict[str, list[float]]] = lambda name: {"memory": STEADY},
    exchange: Callable[[str], together.Exchange] | None = None,
) -> dict[str, tuple[NodeVerdict, int]]:
    """What each node learns."""

    def one(name: str) -> tuple[NodeVerdict, int]:
        made = together.exchange if exchange is None else exchange(name)
        report = Report(name, figures(name), problems=[f"of {name}"])
        return compare(report, lighthouse, "job", len(names), 100, lambda what: None, made)

    with ThreadPoolExecutor(len(names)) as threads:
        return dict(zip(names, threads.map(one, names), strict=True))


def test_two_nodes_exchange_data_and_agree(lighthouse: str) -> None:
    found = meet(lighthouse, ["a", "b"])
    (one, first), (other, second) = found.values()
    assert {first, second} == {0, 1} and one == other
    assert one.names == {first: "a", second: "b"} and one.nodes == {}
    assert one.pairs == [], "they reach each other"


@pytest.mark.parametrize("count", [4, 5])
def test_the_slow_node_and_that_of_a_bad_connection_are_named(lighthouse: str, count: int) -> None:
    def exchange(name: str) -> together.Exchange:
        def rates(address: str, prefix: str, rank: int, seconds: float) -> list[float]:
            assert rank in (0, 1) and 0 < seconds <= 8
            # The partner of the bad node does not know why nothing arrives.
            return [] if bad in prefix.rpartition("/")[2].split("-") else [10.0] * 7

        return rates

    bad = "1"
    names = [f"host{number}" for number in range(count)]
    found = meet(
        lighthouse,
        names,
        lambda name: {"memory": [50.0] * 9 if name == "host2" else STEADY},
        exchange,
    )
    verdicts = [verdict for verdict, _ in found.values()]
    assert all(verdict == verdicts[0] for verdict in verdicts)
    slow = found["host2"][1]
    memory = "memory: the median of the other nodes is 2.00 times its own"
    network = "network: the median of the other nodes is above 0, and its own is 0"
    expected: dict[int, list[str]] = {slow: [memory]}
    expected.setdefault(int(bad), []).append(network)
    assert verdicts[0].nodes == expected and verdicts[0].pairs == []


def test_a_node_that_ends_meanwhile_is_left_out(lighthouse: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "_ANSWER_SEC", 0.5)
    monkeypatch.setattr(together, "_PAIR_SEC", 0.5)
    met = together._Talk.held

    def held(talk: together._Talk, report: Report) -> tuple[NodeVerdict, int]:
        if talk._rank == 1:
            raise OSError("the process ends")
        return met(talk, report)

    monkeypatch.setattr(together._Talk, "held", held)

    def one(name: str) -> NodeVerdict | None:
        try:
            return compare(Report(name), lighthouse, "job", 3, 100, print, lambda *_: [10.0] * 7)[0]
        except NotCompared:  # the one that ends
            return None

    with ThreadPoolExecutor(3) as threads:
        found = [verdict for verdict in threads.map(one, "abc") if verdict is not None]
    assert len(found) == 2 and found[0] == found[1]
    assert sorted(found[0].names) == [0, 2] and found[0].nodes == {} and found[0].pairs == []


def test_a_node_that_meets_no_other(lighthouse: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "_LAST_CALL_SEC", 0.1)
    verdict, number = compare(Report("a"), lighthouse, "job", 4, 100, print)
    assert verdict == NodeVerdict({0: "a"}) and number == 0


def test_no_lighthouse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "_CONNECT_SEC", 0.1)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # it does not listen
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(NotCompared, match="connecting timed out after connect_timeout"):
            compare(Report("a"), address, "job", 2, 100, print)
    with pytest.raises(ValueError, match="endpoint 'http://' is not allowed"):
        compare(Report("a"), "http://", "job", 2, 100, print)


def test_a_peer_that_never_comes_costs_no_longer_than_the_time(lighthouse: str) -> None:
    from torchft.dlrover.rendezvous import _serve_store

    store = _serve_store()
    assert together.exchange(f"127.0.0.1:{store.port}", "nodes/1/0-1", 0, 0.3) == []


def test_time_that_is_up_names_nobody(lighthouse: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(talk: together._Talk, *_: object) -> dict[object, object]:
        talk._deadline = Deadline(0)
        return {}

    monkeypatch.setattr(together._Talk, "_round", late)
    with pytest.raises(NotCompared, match="the connections were not measured in time"):
        compare(Report("a"), lighthouse, "job", 1, 100, print)
