"""Handles, the choice of the store, and subclasses written for either version of upstream."""

from __future__ import annotations

import gc
import json
import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, Optional, cast

import pytest
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, TCPStore

from tests.unit.process_group.ranks import TIMEOUT, connect, in_threads, meeting, on_ranks
from torchft.process_group import (
    ErrorSwallowingProcessGroupWrapper,
    FakeProcessGroupWrapper,
    ProcessGroup,
    ProcessGroupDummy,
    ProcessGroupGloo,
    ProcessGroupWrapper,
    ReconfigureOptions,
    create_store_client,
    is_native,
    native_error,
    reconfigure,
    reconfigure_with_store,
    supports_reconfigure,
)
from torchft.process_group._attempt import ConnectionAttempt
from torchft.process_group.reconfigure import Handle, exchange_handles, plan_rendezvous
from torchft.work import _DummyWork


def handle(i: int, **fields: Any) -> str:
    return Handle(id=f"group{i}", store=f"host{i}:1", **fields).encode()


def options(handles: Any, uuid: int = 1) -> ReconfigureOptions:
    opts = ReconfigureOptions()
    opts.uuid = uuid
    opts.handles = handles
    return opts


# Handles


def test_a_handle_is_json_and_can_be_parsed() -> None:
    sent = Handle(id="a", store="[::1]:1", global_rank=3, spread=True, group_rank=2)
    assert json.loads(sent.encode()) == {
        "id": "a",
        "store": "[::1]:1",
        "global_rank": 3,
        "spread": True,
        "group_rank": 2,
    }
    assert Handle.decode(sent.encode()) == sent


def test_a_handle_of_the_upstream_package_is_understood() -> None:
    text = '{"id": "a", "store": "host:1", "global_rank": null}'
    assert Handle.decode(text) == Handle(id="a", store="host:1")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("junk", "not a torchft handle"),
        ("[]", "not a torchft handle"),
        ("gloo:0:-1:0:localhost:1", "not a torchft handle"),
        ("{}", "'id' must be a non-empty string"),
        ('{"id": 1, "store": "host:1"}', "'id' must be a non-empty string"),
        ('{"id": "a", "store": ""}', "'store' must be a non-empty string"),
        ('{"id": "a", "store": "host:1", "global_rank": "3"}', "'global_rank' must be an integer or null"),
        ('{"id": "a", "store": "host:1", "group_rank": true}', "'group_rank' must be an integer or null"),
    ],
)
def test_a_bad_handle_is_named(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as caught:
        plan_rendezvous([handle(0), text], handle(0), 0)
    assert repr(text) in str(caught.value)


# Rank and store


def test_the_rank_is_the_index_of_ones_own_handle() -> None:
    handles = [handle(i, global_rank=10 + i) for i in range(3)]
    plan = plan_rendezvous(handles, handles[1], 0)
    assert (plan.rank, plan.world_size, plan.store, plan.global_ranks) == (1, 3, "host0:1", [10, 11, 12])
    assert plan_rendezvous(tuple(reversed(handles)), handles[0], 0).rank == 2


def test_global_ranks_are_known_only_when_all_are() -> None:
    assert plan_rendezvous([handle(0, global_rank=0), handle(1)], handle(1), 0).global_ranks is None


def test_ones_own_handle_is_recognised_by_its_id() -> None:
    assert plan_rendezvous([handle(0), handle(1)], handle(1, global_rank=5), 0).rank == 1


@pytest.mark.parametrize(
    ("handles", "complaint"),
    [
        ({handle(0), handle(1)}, "must be a list, whose order gives the ranks, got a set"),
        (handle(0), "must be a list, whose order gives the ranks, got a str"),
        (None, "got a NoneType"),
        ([], "own handle .* is not among"),
        ([handle(1), handle(2)], "own handle .* is not among"),
        ([handle(0), handle(1), handle(1)], "must be distinct"),
    ],
)
def test_unusable_handles_are_refused(handles: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        plan_rendezvous(handles, handle(0), 0)


def spread_store(group_rank: Optional[int], *handles: str) -> str:
    return plan_rendezvous(handles, handles[0], group_rank).store


def test_the_stores_of_all_replica_groups_share_the_load() -> None:
    def peers(group_rank: int) -> list[str]:
        return [handle(i, spread=True, group_rank=group_rank) for i in range(3)]

    assert [spread_store(r, *peers(r)) for r in range(4)] == ["host0:1", "host1:1", "host2:1", "host0:1"]


def test_unless_all_handles_are_marked_the_first_store_is_used() -> None:
    assert spread_store(1, handle(0, spread=True), handle(1)) == "host0:1"
    assert spread_store(1, handle(0), handle(1, spread=True)) == "host0:1"
    assert spread_store(None, handle(0, spread=True), handle(1, spread=True)) == "host0:1"
    # Marked, by an implementation whose handles have no group rank
    assert spread_store(1, handle(0, spread=True), handle(1, spread=True)) == "host1:1"


def test_peers_of_different_group_ranks_still_meet() -> None:
    """Groups are configured by hand, with one process per rank and the rank as group rank."""
    handles = [handle(i, spread=True, group_rank=i) for i in range(2)]
    assert {plan_rendezvous(handles, handles[i], i).store for i in range(2)} == {"host0:1"}


# The group's own handle


def test_the_handle_names_a_store_of_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHFT_HOST", "127.0.0.1")
    group = ProcessGroupGloo()
    group.set_rank_info("replica", 2, 4, 6)
    mine = Handle.decode(group.get_reconfigure_handle())
    assert mine.store.startswith("127.0.0.1:")
    assert (mine.global_rank, mine.spread, mine.group_rank) == (6, True, 2)
    create_store_client(f"{mine.store}/somewhere", TIMEOUT).set("key", "value")
    assert ProcessGroupGloo().get_reconfigure_handle() != group.get_reconfigure_handle()

    group.shutdown()
    gc.collect()
    with pytest.raises(RuntimeError):
        create_store_client(mine.store, timedelta(milliseconds=200))


# Subclasses for both versions of upstream


class ByConfigure(ProcessGroup):
    """A subclass written for upstream 0.2.0."""

    def __init__(self) -> None:
        super().__init__(0, 1)
        self.calls: list[tuple[Any, ...]] = []

    def configure(
        self,
        store_addr: str,
        replica_id: str,
        rank: int,
        world_size: int,
        quorum_id: Optional[int] = None,
        group_rank: Optional[int] = None,
        group_world_size: Optional[int] = None,
        global_ranks: Optional[list[int]] = None,
    ) -> None:
        self.calls.append(
            (store_addr, replica_id, rank, world_size, quorum_id, group_rank, group_world_size, global_ranks)
        )


class ByReconfigure(ProcessGroup):
    """A subclass written for the upstream nightly."""

    def __init__(self) -> None:
        super().__init__(0, 1)
        self.uuids: list[int] = []

    def get_reconfigure_handle(self) -> str:
        return "its own kind"

    def reconfigure(self, opts: ReconfigureOptions) -> dist.Work:
        assert list(opts.handles) == ["its own kind", "another"]
        self.uuids.append(opts.uuid)
        return _DummyWork(None)


def in_front_of(group: ProcessGroup) -> list[ProcessGroup]:
    """The group itself, and wrapped."""
    return [
        group,
        ProcessGroupWrapper(pg=group),
        FakeProcessGroupWrapper(ErrorSwallowingProcessGroupWrapper(group)),
    ]


def test_a_subclass_with_only_configure() -> None:
    inner = ByConfigure()
    for i, group in enumerate(in_front_of(inner)):
        group.set_rank_info("replica", 1, 2, 7)
        mine = group.get_reconfigure_handle()
        other = handle(0, global_rank=5)
        assert supports_reconfigure(group) and not is_native(group)
        assert group.reconfigure(options([other, mine], uuid=9)).wait()
        # Calls from C++, if PyTorch supports that (>= 2.14), reach it too.
        reconfigure = getattr(dist.ProcessGroup, "reconfigure", ProcessGroup.reconfigure)
        reconfigure(group, options([mine, other], uuid=10)).wait()
        assert inner.calls[2 * i :] == [
            ("host0:1/torchft/9", "replica", 1, 2, 9, 1, 2, [5, 7]),
            (f"{Handle.decode(mine).store}/torchft/10", "replica", 0, 2, 10, 1, 2, [7, 5]),
        ]


def test_a_wrapper_with_only_configure_is_called_too() -> None:
    class Counting(ErrorSwallowingProcessGroupWrapper):
        configured = 0

        def configure(self, *args: Any, **kwargs: Any) -> None:
            self.configured += 1
            super().configure(*args, **kwargs)

    inner = ByConfigure()
    group = Counting(inner)
    group.report_error(KeyError())
    group.reconfigure(options([group.get_reconfigure_handle()]))
    assert (group.configured, len(inner.calls), group.error()) == (1, 1, None)


def test_configure_gets_its_arguments_as_from_the_manager() -> None:
    """A subclass may have other names for the required ones."""

    class Named(ByConfigure):
        def configure(self, address: str, name: str, number: int, size: int, **more: Any) -> None:  # type: ignore[override]
            super().configure(address, name, number, size, **more)

    inner = Named()
    for group in (inner, ErrorSwallowingProcessGroupWrapper(inner)):
        group.reconfigure(options([group.get_reconfigure_handle()])).wait()
    assert [call[2:4] for call in inner.calls] == [(0, 1), (0, 1)]


def test_a_subclass_with_only_reconfigure() -> None:
    inner = ByReconfigure()
    for i, group in enumerate(in_front_of(inner)):
        assert supports_reconfigure(group) and not is_native(group)
        assert group.get_reconfigure_handle() == "its own kind"
        group.reconfigure(options(["its own kind", "another"], uuid=i)).wait()
    assert inner.uuids == [0, 1, 2]


def test_new_peers_reset_the_wrappers() -> None:
    group = ErrorSwallowingProcessGroupWrapper(ByReconfigure())
    group.report_error(KeyError())
    group.reconfigure(options(["its own kind", "another"])).wait()
    assert group.error() is None


def test_a_group_without_either_is_an_error() -> None:
    group = ProcessGroup(0, 1)
    with pytest.raises(NotImplementedError, match=r"ProcessGroup\.configure"):
        group.reconfigure(options([group.get_reconfigure_handle()]))


def test_dummy_counts() -> None:
    group = ProcessGroupDummy(0, 1)
    assert (group.configure_count, group.reconfigure_count) == (0, 0)
    group.configure("nowhere", "replica", 0, 1)
    group.reconfigure(options([group.get_reconfigure_handle()]))
    assert (group.configure_count, group.reconfigure_count) == (2, 1)


def test_after_an_error_the_peers_are_unchanged(store: TCPStore) -> None:
    """A bad handle is detected before any resource is released."""
    groups = [ProcessGroupGloo(timeout=TIMEOUT) for _ in range(2)]
    connect(groups, store)
    with pytest.raises(ValueError, match="got a set"):
        groups[0].reconfigure(options({groups[0].get_reconfigure_handle()}))
    on_ranks(2, lambda rank: groups[rank].barrier().wait())
    for group in groups:
        group.shutdown()


def test_an_absent_peer_is_a_timeout_and_the_next_attempt_succeeds(store: TCPStore) -> None:
    groups = [ProcessGroupGloo(timeout=TIMEOUT) for _ in range(2)]
    handles = [group.get_reconfigure_handle() for group in groups]
    opts = options(handles, uuid=1)
    opts.timeout = timedelta(seconds=0.5)
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"(?i)time|connect"):
        groups[0].reconfigure(opts)
    assert time.monotonic() - started < TIMEOUT.total_seconds() / 2
    with pytest.raises(AssertionError, match="not initialized"):
        groups[0].size()

    on_ranks(2, lambda rank: groups[rank].reconfigure(options(handles, uuid=2)).wait())
    on_ranks(2, lambda rank: groups[rank].barrier().wait())
    for group in groups:
        group.shutdown()


# Over a store


def test_reconfigure_with_store_exchanges_handles(store: TCPStore) -> None:
    groups = [ProcessGroupDummy(0, 1) for _ in range(2)]
    where = meeting(store)
    on_ranks(2, lambda rank: reconfigure_with_store(groups[rank], where, rank, 2))
    client = create_store_client(where, TIMEOUT)
    assert client.get("handle/1").decode() == groups[1].get_reconfigure_handle()
    assert int(client.get("uuid")) > 0
    assert [group.reconfigure_count for group in groups] == [1, 1]


def test_all_handles_are_read_in_one_request() -> None:
    """The number of requests does not grow with that of the peers."""
    requests: list[list[str]] = []

    class Counted:
        def __init__(self) -> None:
            self._store = HashStore()

        def set(self, key: str, value: str) -> None:
            self._store.set(key, value)

        def multi_get(self, keys: list[str]) -> list[bytes]:
            requests.append(keys)
            return self._store.multi_get(keys)

    counted = Counted()
    for rank in (1, 2):
        counted.set(f"handle/{rank}", f"of {rank}")
    opts = exchange_handles(cast(Any, counted), "of 0", 0, 3, TIMEOUT)
    assert opts.handles == ["of 0", "of 1", "of 2"] and opts.uuid > 0
    assert requests == [["handle/0", "handle/1", "handle/2", "uuid"]]


def test_reconfigure_with_store_refuses_invalid_arguments(store: TCPStore) -> None:
    with pytest.raises(ValueError, match=r"ProcessGroup does not support .*enable_reconfigure=True"):
        reconfigure_with_store(dist.ProcessGroup(0, 1), meeting(store), 0, 1)
    for rank in (-1, 2):
        with pytest.raises(ValueError, match=f"rank {rank} must be between 0 and world_size - 1 = 1"):
            reconfigure_with_store(ProcessGroupDummy(0, 1), meeting(store), rank, 2)
    with pytest.raises(RuntimeError, match=r"(?i)time"):
        reconfigure_with_store(ProcessGroupDummy(0, 1), meeting(store), 0, 2, timedelta(milliseconds=200))


# Stores


def test_create_store_client_prefixes(store: TCPStore) -> None:
    address = f"localhost:{store.port}"
    create_store_client(f"{address}/a/b", TIMEOUT).set("key", "prefixed")
    create_store_client(address, TIMEOUT).set("key", "plain")
    assert store.get("a/b/key") == b"prefixed"
    assert store.get("key") == b"plain"
    assert isinstance(create_store_client(f"{address}/", TIMEOUT), TCPStore)
    assert isinstance(create_store_client(f"{address}/a", TIMEOUT), PrefixStore)


def test_create_store_client_takes_ipv6(store: TCPStore) -> None:
    create_store_client(f"[::1]:{store.port}/six", TIMEOUT).set("key", "value")
    assert store.get("six/key") == b"value"
    # Without brackets, the last colon still separates the port.
    create_store_client(f"::1:{store.port}/six", TIMEOUT).set("key", "other")
    assert store.get("six/key") == b"other"


@pytest.mark.usefixtures("unhurried_connections")
def test_create_store_client_applies_the_timeout(store: TCPStore) -> None:
    for address in (f"localhost:{store.port}/nobody", f"localhost:{store.port}"):
        client = create_store_client(address, timedelta(seconds=0.2))
        with pytest.raises(RuntimeError, match=r"timeout after 200ms"):
            client.get("is here")


@pytest.mark.parametrize(
    "address",
    ["", "localhost", ":1234", "localhost:", "localhost:x/p", "localhost:0", "localhost:65536", "/p"],
)
def test_a_bad_store_address_is_named(address: str) -> None:
    with pytest.raises(ValueError, match="must be host:port") as caught:
        create_store_client(address, TIMEOUT)
    assert repr(address) in str(caught.value)


def test_a_missing_store_is_an_error_in_time() -> None:
    result = in_threads([lambda: create_store_client("localhost:1/p", timedelta(milliseconds=500))])[0]
    assert isinstance(result, RuntimeError)


@pytest.mark.parametrize(("seconds", "count"), [(0.1, 0), (5.0, 1)])
def test_a_slow_connection_to_a_store_is_logged(
    store: TCPStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    seconds: float,
    count: int,
) -> None:
    """The usual cause is a lost DNS answer. Without this line, the log would not explain the slow quorum."""
    clock = iter([100.0, 100.0 + seconds])
    monkeypatch.setattr(reconfigure, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    create_store_client(f"localhost:{store.port}/late", TIMEOUT)
    warnings = [r.getMessage() for r in caplog.records if "connecting to the store" in r.getMessage()]
    assert len(warnings) == count and all(
        f"localhost:{store.port}/late took 5.0 s" in one for one in warnings
    )


# Methods that the Manager calls


def test_properties_of_a_group_that_the_manager_reads() -> None:
    plain = dist.ProcessGroup(0, 1)  # no backend
    assert not supports_reconfigure(plain)
    assert not supports_reconfigure(object())
    assert is_native(plain) and not is_native(ProcessGroupDummy(0, 1)) and not is_native(object())
    assert native_error(plain) is None
    wrapper = ProcessGroupWrapper(pg=plain)
    assert not supports_reconfigure(wrapper)


def test_an_abandoned_attempt_does_not_go_on_once_it_has_its_store() -> None:
    """It would look for peers that have failed, until another timeout."""
    server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    ended: list[Optional[str]] = []
    reached = threading.Event()

    def connects() -> None:
        try:
            create_store_client(f"localhost:{server.port}", TIMEOUT)
            ended.append(None)
        except RuntimeError as e:
            ended.append(str(e))
        reached.set()

    for error, expected in ((None, None), (RuntimeError("gone"), "gone")):
        reached.clear()
        attempt = ConnectionAttempt(connects, list.clear, TIMEOUT)
        if error is not None:
            attempt.abandon(error)
        attempt.start()
        assert reached.wait(TIMEOUT.total_seconds()) and ended[-1] == expected
