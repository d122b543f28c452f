"""torchft.coordination: the public names of the native classes, and a lighthouse used without a manager."""

from __future__ import annotations

import http.client
import inspect
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest
from processes import free_port

from torchft import _torchft, coordination
from torchft.coordination import LighthouseClient, LighthouseServer, Quorum, QuorumMember

SECOND = timedelta(seconds=1)
SOON = timedelta(seconds=20)


@pytest.fixture
def lighthouse():
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1)
    yield server
    server.shutdown()


def status(server: LighthouseServer) -> dict[str, object]:
    with urlopen(f"{server.address()}/status", timeout=10) as answer:
        return json.load(answer)


def test_exports_are_pinned() -> None:
    assert coordination.__all__ == [
        "LighthouseClient",
        "LighthouseServer",
        "ManagerClient",
        "ManagerServer",
        "Quorum",
        "QuorumMember",
    ]


@pytest.mark.parametrize("name", coordination.__all__)
def test_every_class_documents_every_argument(name: str) -> None:
    exported = getattr(coordination, name)
    assert exported is getattr(_torchft, name)
    doc = inspect.getdoc(exported) or ""
    assert "\nArgs:\n" in doc
    for argument in inspect.signature(exported).parameters:
        assert f"    {argument}" in doc.split("\nArgs:\n")[1], f"{name} does not document {argument}"


def test_signatures_are_the_published_ones() -> None:
    def arguments(function: object) -> list[str]:
        return list(inspect.signature(function).parameters)  # type: ignore[arg-type]

    assert arguments(coordination.ManagerServer) == [
        "replica_id",
        "lighthouse_addr",
        "hostname",
        "bind",
        "store_addr",
        "world_size",
        "heartbeat_interval",
        "connect_timeout",
        "quorum_retries",
    ]
    assert arguments(coordination.ManagerClient)[:2] == ["addr", "connect_timeout"]
    assert arguments(LighthouseServer) == [
        "bind",
        "min_replicas",
        "join_timeout_ms",
        "quorum_tick_ms",
        "heartbeat_timeout_ms",
        "state_dir",
        "max_replicas",
    ]
    assert arguments(LighthouseClient) == ["addr", "connect_timeout"]


def test_a_quorum_contains_its_members_data(lighthouse: LighthouseServer) -> None:
    client = LighthouseClient(lighthouse.address(), SOON)
    quorum = client.quorum(
        "group",
        SOON,
        address="http://m:1",
        store_address="s:2",
        step=7,
        world_size=2,
        data={"über": [1, None]},
    )
    assert isinstance(quorum, Quorum)
    assert quorum.quorum_id > 0
    assert quorum.created.seconds > 1_700_000_000
    assert 0 <= quorum.created.nanos < 1_000_000_000
    assert quorum.participants == [
        QuorumMember(
            "group", "http://m:1", "s:2", step=7, world_size=2, shrink_only=False, data={"über": [1, None]}
        )
    ]
    assert client.quorum("group", SOON).participants == [QuorumMember("group")]


def test_a_missing_quorum_is_a_timeout_error() -> None:
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=2)
    client = LighthouseClient(server.address(), SOON)
    with pytest.raises(TimeoutError):
        client.quorum("alone", timedelta(milliseconds=50))


def test_heartbeats_reach_the_status_page(lighthouse: LighthouseServer) -> None:
    LighthouseClient(lighthouse.address(), SOON).heartbeat("beating")
    assert "beating" in json.dumps(status(lighthouse))


def test_members_that_ask_together_get_one_quorum() -> None:
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=2)
    with ThreadPoolExecutor(2) as threads:
        clients = {name: LighthouseClient(server.address(), SOON) for name in ("b", "a")}
        asked = [threads.submit(client.quorum, name, SOON, step=3) for name, client in clients.items()]
        one, other = (future.result(timeout=30) for future in asked)
    assert one == other
    assert [(m.replica_id, m.step) for m in one.participants] == [("a", 3), ("b", 3)]


def test_invalid_bytes_on_the_port_do_not_end_the_lighthouse(lighthouse: LighthouseServer) -> None:
    host, port = urlsplit(lighthouse.address()).hostname, urlsplit(lighthouse.address()).port
    assert host is not None and port is not None
    for garbage in (
        b"\0" * 64,
        b"\xff\xfe garbage \r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 64,
        b"",
    ):
        with socket.create_connection((host, port), timeout=10) as connection:
            connection.sendall(garbage)
    page = http.client.HTTPConnection(host, port, timeout=10)
    page.request("POST", "/replica/nobody/kill")
    assert page.getresponse().status in (403, 404)
    page.close()
    assert LighthouseClient(lighthouse.address(), SOON).quorum("group", SOON).participants


def test_a_port_in_use_is_named(lighthouse: LighthouseServer) -> None:
    bind = f"127.0.0.1:{urlsplit(lighthouse.address()).port}"
    with pytest.raises(RuntimeError, match=rf"{bind}.*in use"):
        LighthouseServer(bind=bind, min_replicas=1)


def test_a_lighthouse_that_is_not_there_is_named_with_the_time_tried() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(RuntimeError, match=rf"{address}: timed out after 100ms"):
            LighthouseClient(address, timedelta(milliseconds=100))


@pytest.mark.parametrize("address", ["localhost:1234", "ftp://localhost:1234", "http://", "", "http://a b:1"])
def test_an_address_that_cannot_be_one_is_named(address: str) -> None:
    with pytest.raises(RuntimeError, match="http://"):
        LighthouseClient(address, SECOND)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("min_replicas", 0),
        ("min_replicas", -1),
        ("join_timeout_ms", -1),
        ("quorum_tick_ms", 0),
        ("quorum_tick_ms", -5),
        ("heartbeat_timeout_ms", 0),
        ("heartbeat_timeout_ms", 2**63),
        ("heartbeat_timeout_ms", 2**62),
        ("bind", "no-port"),
    ],
)
def test_a_bad_setting_of_the_lighthouse_is_named_with_its_value(setting: str, value: object) -> None:
    settings = {"bind": "127.0.0.1:0", "min_replicas": 1, setting: value}
    with pytest.raises(ValueError, match=setting) as caught:
        LighthouseServer(**settings)  # type: ignore[arg-type]
    assert str(value) in str(caught.value)


@pytest.mark.parametrize("timeout", [timedelta(0), timedelta(seconds=-1)])
def test_a_timeout_must_be_more_than_zero(lighthouse: LighthouseServer, timeout: timedelta) -> None:
    client = LighthouseClient(lighthouse.address(), SOON)
    for call in (
        lambda: client.quorum("group", timeout),
        lambda: client.heartbeat("group", timeout),
    ):
        with pytest.raises(ValueError, match=r"timeout=.*more than 0"):
            call()
    with pytest.raises(ValueError, match="connect_timeout"):
        LighthouseClient(lighthouse.address(), timeout)


def test_a_number_is_no_timeout(lighthouse: LighthouseServer) -> None:
    with pytest.raises(TypeError, match=r"connect_timeout=5 .*timedelta"):
        LighthouseClient(lighthouse.address(), 5)  # type: ignore[arg-type]


def test_shutdown_ends_waiting_calls_and_frees_the_port() -> None:
    bind = f"127.0.0.1:{free_port()}"
    server = LighthouseServer(bind=bind, min_replicas=1)
    client = LighthouseClient(server.address(), SOON)
    client.heartbeat("group")
    address = server.address()
    server.shutdown()
    server.shutdown()
    assert server.address() == address
    with pytest.raises(RuntimeError):
        client.heartbeat("group")
    LighthouseServer(bind=bind, min_replicas=1).shutdown()


def test_the_announced_host_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHFT_HOST", "127.0.0.1")
    server = LighthouseServer(bind="[::]:0", min_replicas=1)
    assert server.address().startswith("http://127.0.0.1:")


def test_a_lighthouse_continues_after_the_quorum_in_its_state_dir(tmp_path: Path) -> None:
    def quorum_id() -> int:
        server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, state_dir=str(tmp_path))
        client = LighthouseClient(server.address(), connect_timeout=timedelta(seconds=30))
        quorum = client.quorum("a", timeout=timedelta(seconds=30))
        server.shutdown()
        return quorum.quorum_id

    first = quorum_id()
    assert quorum_id() >= first + 1024
    assert (tmp_path / "default.state").exists()
    taken = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, state_dir=str(tmp_path))
    with pytest.raises(RuntimeError, match="another lighthouse uses it"):
        LighthouseServer(bind="127.0.0.1:0", min_replicas=1, state_dir=str(tmp_path))
    taken.shutdown()


def test_a_list_of_lighthouses_is_checked() -> None:
    with pytest.raises(RuntimeError, match="is in it twice"):
        LighthouseClient("http://a:1,http://a:1", connect_timeout=timedelta(seconds=1))
