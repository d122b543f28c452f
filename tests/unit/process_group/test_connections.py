"""Finding the connections of a Gloo group, and the effect of cutting them."""

from __future__ import annotations

import re
import socket
import struct
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from tests.unit.process_group.gloo_peers import PEER_ENDED, SOON, connections_of, first_line, gloo, pair
from tests.unit.process_group.ranks import TIMEOUT, connect, in_threads, meeting, on_ranks
from torchft.process_group._gloo.connections import GlooConnections, _listening, _raw


def test_the_peers_notice_an_abort(store: TCPStore) -> None:
    groups = [gloo() for _ in range(3)]
    connect(groups, store)
    works = [groups[rank].broadcast_one(torch.zeros(1), 2) for rank in (0, 1)]
    groups[2].abort()
    results = in_threads([work.wait for work in works], timedelta(seconds=SOON))
    assert [type(result) for result in results] == [RuntimeError] * 2
    assert all(re.search(PEER_ENDED, str(result)) for result in results), results
    for group in groups:
        group.shutdown()


def test_only_the_connections_of_this_group_are_cut(store: TCPStore) -> None:
    here, there = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    mine, others = pair(store), pair(store)
    mine[0].abort()

    on_ranks(2, lambda rank: others[rank].barrier().wait())
    assert store.add("still connected", 1) == 1
    for near, far in ((here, there), (client, accepted)):
        near.sendall(b"x")
        assert far.recv(1) == b"x"
        near.close()
        far.close()
    for group in mine + others:
        group.shutdown()


def test_ranks_of_one_process_have_separate_connections(store: TCPStore) -> None:
    """They share a table of descriptors, and connect to the same addresses."""
    groups = [gloo() for _ in range(5)]
    connect(groups, store)
    assert [connections_of(group).alive() for group in groups] == [(4, 4)] * 5
    # Two ranks leave: the others have lost the connections to these two, and no other connection.
    groups[0].abort()
    groups[1].abort()
    deadline = time.monotonic() + 10
    while [connections_of(group).alive() for group in groups[2:]] != [(2, 4)] * 3:
        assert time.monotonic() < deadline, [connections_of(group).alive() for group in groups[2:]]
        time.sleep(0.01)
    for group in groups:
        group.shutdown()


def test_a_reused_descriptor_is_not_cut(store: TCPStore) -> None:
    groups = pair(store)
    connections = connections_of(groups[0])
    assert len(connections) > 0
    # Simulates that the connections were closed, and the numbers of their descriptors were reused for these.
    pairs = [socket.socketpair() for _ in range(len(connections))]
    connections._connections = {
        ours.fileno(): connection for (ours, _), connection in zip(pairs, connections._connections.values())
    }
    connections.shutdown()
    assert len(connections) == 0
    for ours, theirs in pairs:
        ours.sendall(b"x")
        assert theirs.recv(1) == b"x"
        ours.close()
        theirs.close()
    on_ranks(2, lambda rank: groups[rank].barrier().wait())
    for group in groups:
        group.shutdown()


@pytest.mark.parametrize("interfaces", ["lo", "lo,lo"])
def test_every_context_of_gloo_is_cut(
    store: TCPStore, interfaces: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operations alternate between the contexts, so these two operations use one context each."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interfaces)
    groups = pair(store)
    assert len(connections_of(groups[0])) == len(interfaces.split(","))
    works = [groups[1].broadcast_one(torch.zeros(1), 0) for _ in range(2)]
    groups[0].abort()
    results = in_threads([work.wait for work in works], timedelta(seconds=SOON))
    assert [first_line(r)[-6:] != "broken" for r in results if isinstance(r, RuntimeError)] == [True, True]
    for group in groups:
        group.shutdown()


def test_ipv6_is_cut(store: TCPStore) -> None:
    if not can_bind("::1"):
        pytest.skip("this host has no IPv6")
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="::1")]
    options._timeout = TIMEOUT
    prefix = meeting(store).partition("/")[2]

    def make(rank: int) -> tuple[Any, GlooConnections]:
        own = dist.PrefixStore(
            prefix, TCPStore("localhost", store.port, is_master=False, wait_for_workers=False)
        )
        return dist.ProcessGroupGloo(own, rank, 2, options), GlooConnections(own, rank, 2)

    (first, connections), (second, _) = on_ranks(2, make)
    assert len(connections) == 2
    work = second.recv([torch.zeros(1)], 0, 0)
    connections.shutdown()
    assert isinstance(in_threads([work.wait], timedelta(seconds=SOON))[0], RuntimeError)
    del first


def can_bind(address: str) -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def published(address: bytes, host: bytes = b"host") -> bytes:
    """The address that a rank of Gloo publishes; most of its bytes are uninitialized memory."""
    rest = struct.pack("=H", socket.AF_INET) + b"\x11\x11" + b"\x7f\0\0\1"  # as if left by an earlier use
    storage = (address + rest * 16)[:128]
    return (
        struct.pack("=Q", len(host))
        + host
        + struct.pack("=Q", 136)
        + storage
        + bytes(8)
        + struct.pack("=Q", 1)
    )


def test_the_address_is_read_from_a_ranks_published_bytes() -> None:
    four = _raw(socket.AF_INET, ("1.2.3.4", 258))[0]
    six = _raw(socket.AF_INET6, ("fe80::1", 258, 0, 0))[0]
    assert _listening(published(four)) == four
    assert _listening(published(six[:4] + b"flow" + six[8:], host=b"")) == six
    unix = struct.pack("=H", socket.AF_UNIX)
    for other in (b"", b"text", published(unix), published(four)[:40], b"\xff" * 200):
        assert _listening(other) is None


def test_without_published_addresses_nothing_is_cut() -> None:
    assert len(GlooConnections(dist.HashStore(), 0, 2)) == 0
    assert len(GlooConnections(dist.HashStore(), 0, 1)) == 0


@pytest.mark.parametrize(
    ("family", "address", "raw"),
    [
        (socket.AF_INET, ("1.2.3.4", 258), [b"\x01\x02\x01\x02\x03\x04"]),
        (socket.AF_INET6, ("::1", 258, 0, 0), [b"\x01\x02" + bytes(4) + bytes(15) + b"\x01"]),
        (
            socket.AF_INET6,
            ("fe80::1%lo", 258, 0, 1),
            [b"\x01\x02" + bytes(4) + b"\xfe\x80" + bytes(13) + b"\x01"],
        ),
        (
            socket.AF_INET6,
            ("::ffff:1.2.3.4", 258, 0, 0),
            [b"\x01\x02" + bytes(4) + bytes(10) + b"\xff\xff\x01\x02\x03\x04", b"\x01\x02\x01\x02\x03\x04"],
        ),
        (socket.AF_UNIX, "/some/path", []),
        (socket.AF_UNSPEC, (1, 2), []),
    ],
)
def test_the_layout_of_addresses_in_memory(family: int, address: object, raw: list[bytes]) -> None:
    # The first two bytes are the family, in this machine's byte order.
    assert [text[2:] for text in _raw(family, address)] == raw
