from __future__ import annotations

import socket
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
from torch.distributed import TCPStore

from torchft import addresses
from torchft._manager.quorum.group import _open_store
from torchft.addresses import (
    HEAL_HOSTS_ENV,
    HOST_ENV,
    LIGHTHOUSE_ENV,
    announced_host,
    announced_store_host,
    heal_hosts,
    host_port,
    loopback,
    store_host,
)
from torchft.checkpointing import HTTPTransport
from torchft.http import _has_ipv6
from torchft.process_group.reconfigure import create_store_client, host_store


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HOST_ENV, raising=False)
    monkeypatch.delenv(LIGHTHOUSE_ENV, raising=False)
    monkeypatch.delenv(HEAL_HOSTS_ENV, raising=False)
    monkeypatch.setattr(addresses, "_lighthouse", "")


def test_setting_wins_over_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOST_ENV, "127.0.0.7")
    assert announced_host("http://10.0.0.1:1") == "127.0.0.7"


def test_setting_may_be_bracketed_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOST_ENV, "[::1]")
    assert announced_host() == "::1"


def test_setting_may_be_an_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOST_ENV, "lo")
    assert announced_host() == "127.0.0.1"


def test_bad_setting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOST_ENV, "no such host")
    with pytest.raises(ValueError, match=r"TORCHFT_HOST='no such host' is neither.*interfaces: .*lo"):
        announced_host()


@pytest.mark.parametrize(("rank", "expected"), [("0", ["127.0.0.1", "10.1.2.3"]), ("1", ["10.1.2.3"])])
def test_a_state_is_fetched_from_the_address_of_its_rank(
    rank: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And if that does not answer, from the address of the host."""
    monkeypatch.setenv("TORCHFT_HOST", "10.1.2.3")
    assert heal_hosts() == ["10.1.2.3"]
    monkeypatch.setenv("TORCHFT_HEAL_HOSTS", "lo, 10.1.2.3")
    monkeypatch.setenv("LOCAL_RANK", rank)
    assert heal_hosts() == expected
    transport: HTTPTransport[object] = HTTPTransport(timedelta(seconds=5), 0)
    try:
        assert urlsplit(transport.metadata()).hostname == expected[0]
    finally:
        transport.shutdown(wait=False)


@pytest.mark.parametrize(
    ("rank", "text"),
    [
        ("0", r"TORCHFT_HEAL_HOSTS='no such host' is neither.*interfaces: .*lo"),
        ("2", r"TORCHFT_HEAL_HOSTS='no such host,lo' has 2 addresses, none for LOCAL_RANK=2"),
    ],
)
def test_a_bad_address_of_a_rank_is_named(rank: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHFT_HEAL_HOSTS", "no such host,lo")
    monkeypatch.setenv("LOCAL_RANK", rank)
    with pytest.raises(ValueError, match=text):
        HTTPTransport(timedelta(seconds=5), 0)


def test_route_is_used_unless_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "_route_towards", lambda addr: "10.1.2.3" if "far" in addr else None)
    monkeypatch.setattr(addresses, "_resolves", lambda name: True)
    assert announced_host("http://far:1") == "10.1.2.3"
    monkeypatch.setenv(LIGHTHOUSE_ENV, "http://far:1")
    assert announced_host() == "10.1.2.3"
    assert announced_host("http://near:1") == socket.gethostname()


def test_the_lighthouse_of_a_manager_determines_the_route_of_all_announcements(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Process groups and checkpoint servers use the same route, including those that were made before."""
    transport = HTTPTransport(timedelta(seconds=10), num_chunks=0)
    try:
        monkeypatch.setattr(addresses, "_route_towards", lambda addr: "10.1.2.3" if "far" in addr else None)
        monkeypatch.setenv(LIGHTHOUSE_ENV, "http://near:1")
        addresses.use_lighthouse("http://far:1")
        assert announced_host() == "10.1.2.3"
        assert (
            transport.metadata().startswith("http://10.1.2.3:")
            and transport.address() == transport.metadata()
        )
    finally:
        transport.shutdown()


@pytest.mark.parametrize(
    "addr", ["", "nonsense", "http://localhost:29510", "http://[::1]:1", "http://:99999999"]
)
def test_there_is_no_route_to_a_loopback_or_unknown_lighthouse(addr: str) -> None:
    assert addresses._route_towards(addr) is None


@pytest.mark.parametrize("master", ["localhost", "127.0.0.1", "[::1]", "node7", "node7.cluster.example"])
def test_a_store_on_this_host_is_announced_with_the_host_of_all_addresses(
    master: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun names its store after the host, whose name other hosts may not know."""
    monkeypatch.setattr(socket, "gethostname", lambda: "node7")
    monkeypatch.setenv(HOST_ENV, "10.1.2.3")
    assert announced_store_host(master, 5) == "10.1.2.3:5"


@pytest.mark.parametrize("master", ["node8", "node8.cluster.example", "10.0.0.8"])
def test_a_store_on_another_host_keeps_its_name(master: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node7")
    monkeypatch.setenv(HOST_ENV, "10.1.2.3")
    assert announced_store_host(master, 5) == f"{master}:5"


def test_hostname_that_does_not_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "_resolves", lambda name: False)
    assert announced_host() == "127.0.0.1", "nor does localhost, in minimal images"


def test_a_store_of_a_host_that_does_not_resolve_its_own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node7")
    monkeypatch.setattr(addresses, "_resolves", lambda name: False)
    hosts = ["localhost", "node7", "node7.cluster.example", "node8", "10.0.0.7"]
    assert [store_host(host) for host in hosts] == 3 * ["127.0.0.1"] + ["node8", "10.0.0.7"]
    monkeypatch.setattr(addresses, "_resolves", lambda name: True)
    assert [store_host(host) for host in hosts] == ["127.0.0.1", *hosts[1:]], (
        "its name may be that of another address"
    )


def test_the_numeric_loopback_address(monkeypatch: pytest.MonkeyPatch) -> None:
    assert loopback() == "127.0.0.1"

    class WithoutIPv4(socket.socket):
        def bind(self, address: Any) -> None:
            raise OSError("Cannot assign requested address")

    monkeypatch.setattr(socket, "socket", WithoutIPv4)
    assert loopback() == "::1"


@pytest.mark.skipif(not _has_ipv6(), reason="needs IPv6")
@pytest.mark.parametrize("here", ["127.0.0.1", "::1"])
def test_own_stores_are_reached_by_either_address(here: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchft.process_group.reconfigure.loopback", lambda: here)
    monkeypatch.setenv(HOST_ENV, here)
    store, address = host_store(timedelta(seconds=30))
    store.set("key", "value")
    assert address == host_port(here, store.port)
    assert create_store_client(address, timedelta(seconds=30)).get("key") == b"value"


def test_a_store_at_a_name_of_this_host_that_does_not_resolve_is_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torchrun names the store of a group after the host."""
    monkeypatch.setattr(socket, "gethostname", lambda: "node7.invalid")
    monkeypatch.setattr(addresses, "_resolves", lambda name: False)
    timeout = timedelta(seconds=30)
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    server.set("key", "value")
    assert create_store_client(f"node7.invalid:{server.port}", timeout).get("key") == b"value"
    settings: Any = SimpleNamespace(
        store_addr="node7.invalid", store_port=server.port, timeout=timeout, restart_count=0
    )
    assert _open_store(settings).get("key") == b"value"


def test_host_port_brackets_ipv6() -> None:
    assert host_port("::1", 5) == "[::1]:5"
    assert host_port("a.b", 5) == "a.b:5"
