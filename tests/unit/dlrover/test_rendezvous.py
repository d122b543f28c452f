"""torchrun's rendezvous: handlers of several nodes in one process, with a real lighthouse."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Optional

import pytest
from processes import free_port
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousTimeoutError,
)

from tests.unit.waiting import wait_until
from torchft.coordination import LighthouseServer
from torchft.dlrover import DlroverRendezvousBackend, TorchRendezvousService
from torchft.dlrover.torchrun import get_handler

Make = Callable[..., RendezvousHandler]


@pytest.fixture
def lighthouse() -> Iterator[str]:
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1)
    yield server.address().removeprefix("http://")
    server.shutdown()


@pytest.fixture
def make(lighthouse: str) -> Iterator[Make]:
    made = []

    def make(
        nodes: tuple[int, int] = (1, 2), run_id: str = "job/0", endpoint: str = lighthouse, **conf: Any
    ) -> RendezvousHandler:
        conf = {"timeout": 900, "connect_timeout": 10, "join_timeout": 60, **conf}
        handler = get_handler()(
            RendezvousParameters("torchft", endpoint, run_id, *nodes, local_addr="localhost", **conf)
        )
        made.append(handler)
        return handler

    yield make
    for handler in made:
        handler.shutdown()


def meet(*handlers: RendezvousHandler) -> list[RendezvousInfo]:
    """Returns the next round of each of them."""
    with ThreadPoolExecutor(len(handlers)) as threads:
        return [info.result(60) for info in [threads.submit(handler.next_rendezvous) for handler in handlers]]


def test_torchrun_finds_the_backend() -> None:
    (found,) = entry_points(group="torchrun.handlers", name="torchft")
    assert found.load() is get_handler


def test_two_nodes_meet_at_the_store_of_rank_0(make: Make) -> None:
    a, b = make(), make()
    infos = meet(a, b)
    assert sorted(info.rank for info in infos) == [0, 1]
    assert [info.world_size for info in infos] == [2, 2]
    infos[0].store.set("key", "value")
    assert infos[1].store.get("key") == b"value"
    first, second = (info.bootstrap_store_info for info in infos)
    assert first is not None and second is not None
    assert (first.master_addr, first.master_port) == (second.master_addr, second.master_port)
    assert a.get_backend() == "torchft" and a.get_run_id() == "job_0" and a.use_agent_store
    assert a.num_nodes_waiting() == 0

    number = int(os.environ["TORCHFT_ROUND"])
    # The workers of node a fail: node b is notified, both nodes meet again, and their workers get another
    # store.
    with ThreadPoolExecutor(1) as thread:
        again = thread.submit(a.next_rendezvous)
        wait_until(lambda: b.num_nodes_waiting() > 0)
        joined = b.next_rendezvous()
        assert {again.result(60).rank, joined.rank} == {0, 1}
    assert (
        joined.bootstrap_store_info is not None
        and joined.bootstrap_store_info.master_port != first.master_port
    )
    assert not joined.store.check(["key"])
    assert int(os.environ["TORCHFT_ROUND"]) == number + 1


@pytest.mark.slow
def test_the_workers_of_a_node_continue_until_a_larger_size_is_reached(make: Make) -> None:
    conf = {"nodes": (1, 4), "sizes": "powers_of_two", "last_call_timeout": 0.5}
    a = make(**conf)
    (info,) = meet(a)
    assert info.world_size == 1
    b = make(**conf)
    with ThreadPoolExecutor(4) as threads:
        infos = [threads.submit(b.next_rendezvous)]
        wait_until(lambda: a.num_nodes_waiting() == 1)
        infos.append(threads.submit(a.next_rendezvous))
        assert {info.result(60).world_size for info in infos} == {2}
        c = make(**conf)
        infos = [threads.submit(c.next_rendezvous)]
        with pytest.raises(TimeoutError):
            infos[0].result(1.0)
        assert a.num_nodes_waiting() == b.num_nodes_waiting() == 0
        infos.append(threads.submit(make(**conf).next_rendezvous))
        for one in (a, b):
            wait_until(lambda one=one: one.num_nodes_waiting() > 0)
            infos.append(threads.submit(one.next_rendezvous))
        assert sorted(info.result(60).rank for info in infos) == [0, 1, 2, 3]


def test_the_wait_for_a_node_that_ends_right_after_the_release_is_short(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchft.dlrover.rendezvous._MEET_SEC", 0.5)
    a, b = make(), make()
    service: TorchRendezvousService = b._service  # type: ignore[attr-defined]
    with ThreadPoolExecutor(1) as thread:
        info = thread.submit(a.next_rendezvous)
        service.set_state()
        released = service.get_state(30)
        assert released is not None and released.size == 2
        service.close(finished=False)  # its agent ended, and never connects to the store
        assert info.result(60).world_size == 1


def test_a_node_that_has_finished_closes_the_rendezvous(make: Make) -> None:
    a, b = make(), make()
    meet(a, b)
    assert not b.is_closed()
    assert a.shutdown()
    wait_until(b.is_closed)
    with pytest.raises(RendezvousClosedError, match="a node has ended its work"):
        b.next_rendezvous()
    assert b.shutdown()
    (info,) = meet(make((1, 1)))  # another job with the same id
    assert info.world_size == 1


def test_a_spare_node_that_leaves_does_not_close_the_rendezvous_for_the_others(make: Make) -> None:
    """torchrun calls shutdown after any error, also on a node that was in no round."""
    a, spare = make((1, 1)), make((1, 1), join_timeout=0.2)
    meet(a)
    with pytest.raises(RendezvousTimeoutError, match="round 1 trains with 1 node, and 1 more asked"):
        spare.next_rendezvous()
    assert spare.shutdown()
    (info,) = meet(a)  # because its workers fail
    assert info.world_size == 1 and not a.is_closed()


def test_set_closed_closes_it_for_all(make: Make) -> None:
    a, b = make(), make()
    meet(a, b)
    a.set_closed()
    wait_until(b.is_closed)


def test_a_round_continues_without_the_lighthouse(make: Make) -> None:
    # A lighthouse that restarts without its state waits one heartbeat timeout for the nodes of the previous
    # round.
    bind = f"127.0.0.1:{free_port()}"
    server = LighthouseServer(bind=bind, min_replicas=1, heartbeat_timeout_ms=10_000)
    address = server.address()
    a, b = (make(endpoint=address, join_timeout=30) for _ in range(2))
    meet(a, b)
    server.shutdown()
    assert a.num_nodes_waiting() == b.num_nodes_waiting() == 0
    server = LighthouseServer(bind=bind, min_replicas=1, heartbeat_timeout_ms=10_000)
    try:
        infos = meet(a, b)
        assert sorted(info.rank for info in infos) == [0, 1]
        assert infos[0].store.set("key", "") is None
        service: TorchRendezvousService = a._service  # type: ignore[attr-defined]
        released = service.get_state()
        assert released is not None and released.number == 2, (
            "it knows the number of the round before from the nodes"
        )
    finally:
        for handler in (a, b):
            handler.shutdown()
        server.shutdown()


def test_the_next_lighthouse_of_a_list_is_asked_when_one_does_not_serve(lighthouse: str, make: Make) -> None:
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1)
    endpoint = f"127.0.0.1:1, {server.address()},{lighthouse}"
    a, b = (make(endpoint=endpoint) for _ in range(2))
    meet(a, b)
    server.shutdown()
    assert sorted(info.rank for info in meet(a, b)) == [0, 1]


def test_the_backend_returns_a_round_when_it_is_released(lighthouse: str) -> None:
    services = [
        TorchRendezvousService(lighthouse, "job/0", store=f"node{i}:1", min_nodes=2, max_nodes=2)
        for i in range(2)
    ]
    a, b = (DlroverRendezvousBackend(service) for service in services)
    assert a.name == "torchft"
    assert a.get_state() is None
    assert a.set_state(b"") is None
    assert a.get_state() is None  # the other node is missing
    assert b.set_state(b"") is None
    wait_until(a.get_state)
    wait_until(b.get_state)
    state, token = _some(a.get_state())
    assert token == 1 and b'"size": 2' in state
    # A node that knows another round requests nothing.
    assert a.set_state(b"", 7) == (state, 1, False)
    assert a.set_state(b"", 1) == (state, 1, True)
    wait_until(lambda: services[1].waiting)
    for service in services:
        service.close()


def _some(state: Optional[tuple[bytes, int]]) -> tuple[bytes, int]:
    assert state is not None
    return state


# Bad input.


@pytest.mark.parametrize(
    ("conf", "message"),
    [
        ({"sizes": "3", "nodes": (1, 2)}, r"sizes is \"3\": 3 nodes are not within nnodes 1:2"),
        ({"sizes": "powers_of_two", "nodes": (5, 7)}, "none is within nnodes 5:7"),
        ({"sizes": "odd"}, 'it must be "all", "powers_of_two"'),
        ({"last_call_timeout": "soon"}, "last_call_timeout='soon' is not allowed; allowed: seconds"),
        ({"join_timeout": -1}, "join_timeout=-1 is not allowed; allowed: 0 to 86400"),
        ({"keep_alive_interval": 5}, "keep_alive_interval: not known to torchft; allowed: connect_timeout"),
        ({"run_id": "a b/0"}, 'job is "a b"'),
        ({"endpoint": "nowhere"}, "endpoint 'nowhere' is not allowed; allowed: HOST:PORT"),
        ({"endpoint": ""}, "endpoint '' is not allowed"),
        ({"endpoint": "a:1,b"}, "endpoint 'a:1,b' is not allowed; allowed: HOST:PORT"),
    ],
)
def test_a_setting_that_is_not_allowed_is_named(make: Make, conf: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**conf)


@pytest.mark.parametrize("name", ["CA", "CERT"])
def test_missing_certificates(make: Make, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(f"TORCHFT_TLS_{name}", "/nowhere")
    with pytest.raises(
        ValueError, match=rf"TORCHFT_TLS_{name}='/nowhere'.*: No such file or directory; allowed: files"
    ):
        make(endpoint="127.0.0.1:1")


def test_a_server_that_is_not_a_lighthouse(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchft.dlrover.rendezvous.HttpLighthouse.post", lambda *_: ["hello"])
    with pytest.raises(RendezvousError, match=r"answered \"\['hello'\]\": is it a lighthouse\?"):
        make()


def test_no_answer_of_a_lighthouse(make: Make) -> None:
    message = r"timed out after connect_timeout=0\.5 s"
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(RendezvousConnectionError, match=message),
    ):
        make(endpoint=f"127.0.0.1:{silent.getsockname()[1]}", connect_timeout=0.5)
    with pytest.raises(RendezvousConnectionError, match=message):
        make(endpoint="127.0.0.1:1", connect_timeout=0.5)


def test_an_id_in_use_with_other_settings(make: Make) -> None:
    make((1, 2))
    with pytest.raises(RendezvousError, match="in use by 1 node with nnodes 1:2"):
        make((1, 4))


def test_a_group_that_cannot_have_the_size_of_the_others(make: Make) -> None:
    meet(make((2, 2), "job/0"), make((2, 2), "job/0"))
    with pytest.raises(RendezvousError, match="the job's other groups have 2 nodes each"):
        make((3, 3), "job/1")


def test_nodes_that_never_join(make: Make) -> None:
    message = r"timed out after join_timeout=0\.2 s: 1 of at least 2 nodes asked"
    with pytest.raises(RendezvousTimeoutError, match=message):
        make((2, 2), join_timeout=0.2).next_rendezvous()


def test_a_store_that_is_not_reached(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, the nodes cannot reach the host of the store: the error of the timeout names this
    cause.
    """
    monkeypatch.setattr("torchft.dlrover.rendezvous._MEET_SEC", 0.2)
    monkeypatch.setattr("torchft.dlrover.rendezvous.host_port", lambda *_: "127.0.0.1:1")
    message = r"the nodes of round \d+ did not meet at 127\.0\.0\.1:1: "
    errors: list[str] = []
    for join_timeout in (1, 5, 30):  # longer if no round began in time
        nodes = [make((2, 2), join_timeout=join_timeout) for _ in range(2)]
        errors = []
        with ThreadPoolExecutor(2) as threads:
            for node in [threads.submit(node.next_rendezvous) for node in nodes]:
                with pytest.raises(RendezvousTimeoutError) as raised:
                    node.result(60)
                errors.append(str(raised.value))
        if all(re.search(message, error) for error in errors):
            return
        for handler in nodes:
            handler.shutdown()
    raise AssertionError(errors)


def test_a_wrong_token(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    monkeypatch.setenv("TORCHFT_TOKEN_FILE", str(token))
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1)
    try:
        (info,) = meet(make((1, 1), endpoint=server.address()))
        assert info.world_size == 1
        other = tmp_path / "other"
        other.write_text("guess\n")
        monkeypatch.setenv("TORCHFT_TOKEN_FILE", str(other))
        with pytest.raises(RendezvousError, match="not the job's"):
            make((1, 1), "other/0", endpoint=server.address())
    finally:
        server.shutdown()
