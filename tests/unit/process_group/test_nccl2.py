"""PyTorch's newer NCCL backend: when it is used, its options, and jobs with both backends. No device is needed."""

from __future__ import annotations

import itertools
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, ClassVar, Optional
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from tests.unit.children import run_python
from tests.unit.process_group.ranks import TIMEOUT, in_threads, meeting, on_ranks
from torchft.process_group import ProcessGroupBabyNCCL, ProcessGroupNCCL, create_store_client, nccl, nccl2
from torchft.process_group.reconfigure import Handle, exchange_handles, options_of, plan_rendezvous


class Nccl2:
    """Replaces PyTorch's backend, without a device; records its options."""

    made: ClassVar[list[Nccl2]] = []
    instances: ClassVar[itertools.count[int]] = itertools.count()
    supports_reconfigure = True

    def __init__(self, store: object, rank: int, world_size: int, opts: Any) -> None:
        self.rank, self.opts, self.store = rank, opts, store
        self.instance = next(self.instances)
        self.reconfigured_with: Any = None
        self.made.append(self)

    def get_reconfigure_handle(self) -> str:
        return f"nccl2:{self.rank}:-1:{self.instance}"

    def reconfigure(self, opts: Any) -> Any:
        self.reconfigured_with = opts
        return MagicMock()


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restores environment variables that the constructors set, and adds the backend to any version of PyTorch."""
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_NONBLOCKING_TIMEOUT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(Nccl2, "made", [])
    monkeypatch.setattr(dist, "ProcessGroupNCCL2", Nccl2, raising=False)
    if not hasattr(dist, "ProcessGroupNCCL") or not hasattr(dist.ProcessGroupNCCL.Options(), "enable_reconfigure"):
        monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=SimpleNamespace), raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(nccl2.dist, "ProcessGroup", MagicMock())


@pytest.mark.parametrize(
    ("argument", "variable", "expected"),
    [
        (None, None, "legacy"),
        (None, "", "legacy"),
        (None, "legacy", "legacy"),
        (None, "nccl2", "nccl2"),
        ("legacy", "nccl2", "legacy"),
        ("nccl2", "legacy", "nccl2"),
    ],
)
def test_the_argument_takes_precedence_over_the_environment(
    monkeypatch: pytest.MonkeyPatch, argument: Optional[str], variable: Optional[str], expected: str
) -> None:
    if variable is not None:
        monkeypatch.setenv(nccl2.IMPLEMENTATION_ENV, variable)
    group = ProcessGroupNCCL(implementation=argument)
    assert group._implementation == expected
    assert group.getBackendName() == {"legacy": "torchft-nccl", "nccl2": "torchft-nccl2"}[expected]


def test_a_bad_value_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="implementation='new': allowed are 'legacy' and 'nccl2'"):
        ProcessGroupNCCL(implementation="new")
    monkeypatch.setenv(nccl2.IMPLEMENTATION_ENV, "NCCL2")
    with pytest.raises(ValueError, match="TORCHFT_NCCL_IMPLEMENTATION='NCCL2': allowed are 'legacy' and 'nccl2'"):
        ProcessGroupNCCL()


def test_the_error_names_a_pytorch_without_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(dist, "ProcessGroupNCCL2")
    with pytest.raises(RuntimeError, match=rf"implementation='nccl2': PyTorch {torch.__version__[:4]}.* has no Proc"):
        ProcessGroupNCCL(implementation="nccl2")
    monkeypatch.setenv(nccl2.IMPLEMENTATION_ENV, "nccl2")
    with pytest.raises(RuntimeError, match="TORCHFT_NCCL_IMPLEMENTATION='nccl2'"):
        ProcessGroupNCCL()
    assert ProcessGroupNCCL(implementation="legacy")._implementation == "legacy"


@pytest.mark.parametrize("world_size", [1, 3])
def test_options_of_the_backend(store: TCPStore, world_size: int) -> None:
    where = meeting(store)

    def connect(rank: int) -> None:
        group = ProcessGroupNCCL(TIMEOUT, implementation="nccl2")
        group.configure(where, "replica", rank, world_size, global_ranks=[4, 9, 2][:world_size])

    on_ranks(world_size, connect)
    made = sorted(Nccl2.made, key=lambda backend: backend.rank)
    assert [backend.rank for backend in made] == list(range(world_size))
    for backend in made:
        assert backend.opts.enable_reconfigure, "an error ends the process otherwise"
        assert backend.opts._timeout >= timedelta(days=1), "torchft's own timeout applies"
        assert backend.opts.global_ranks_in_group == [4, 9, 2][:world_size]
        assert list(backend.reconfigured_with.handles) == [one.get_reconfigure_handle() for one in made]
        assert backend.reconfigured_with.uuid == made[0].reconfigured_with.uuid > 0
        assert backend.reconfigured_with.timeout == TIMEOUT


def reconfigure(groups: list[ProcessGroupNCCL], uuid: int, handles: list[str]) -> list[Any]:
    def one(rank: int) -> None:
        groups[rank].reconfigure(options_of(uuid, handles, TIMEOUT))

    return in_threads([lambda rank=rank: one(rank) for rank in range(len(groups))])


@pytest.fixture
def exchanged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The handles that ranks put into a store."""
    handles: list[str] = []

    def exchange(store: dist.Store, handle: str, *args: Any, **kwargs: Any) -> Any:
        handles.append(handle)
        return exchange_handles(store, handle, *args, **kwargs)

    monkeypatch.setattr(nccl2, "exchange_handles", exchange)
    monkeypatch.setattr(ProcessGroupNCCL, "_rehearse", lambda self: None)
    monkeypatch.setattr(ProcessGroupNCCL, "_use_first", lambda self, pg: None)
    return handles


def test_the_handles_of_backends_travel_with_the_quorum(exchanged: list[str]) -> None:
    groups = [ProcessGroupNCCL(TIMEOUT, implementation="nccl2") for _ in range(3)]
    for uuid in (7, 8):
        handles = [group.get_reconfigure_handle() for group in groups]
        assert handles == [group.get_reconfigure_handle() for group in groups], "equal until it is used"
        expected = [Handle.decode(handle).backend for handle in handles]
        assert len(set(expected)) == 3
        before = len(Nccl2.made)
        assert reconfigure(groups, uuid, handles) == [None] * 3
        used = [
            backend for backend in Nccl2.made if backend.reconfigured_with and backend.reconfigured_with.uuid == uuid
        ]
        assert len(used) == 3 and len(Nccl2.made) == before
        for backend in used:
            assert list(backend.reconfigured_with.handles) == expected
            backend.store.set("key of NCCL", str(uuid))  # where the peers meet now
            assert all(peer.store.get("key of NCCL") == str(uuid).encode() for peer in used)
    assert exchanged == []
    for group in groups:
        group.shutdown()


def test_peers_exchange_handles_over_the_store_if_one_of_them_has_announced_none(
    exchanged: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no device yet, or is of an older version."""
    groups = [ProcessGroupNCCL(TIMEOUT, implementation="nccl2") for _ in range(2)]
    handles = [groups[0].get_reconfigure_handle()]
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "current_device", MagicMock(side_effect=RuntimeError("no NVIDIA driver")))
        handles.append(groups[1].get_reconfigure_handle())
    assert reconfigure(groups, 7, handles) == [None] * 2
    assert len(set(exchanged)) == 2
    for group in groups:
        group.shutdown()


def test_a_handle_is_for_one_reconfiguration(exchanged: list[str]) -> None:
    group = ProcessGroupNCCL(TIMEOUT, implementation="nccl2")
    handles = [group.get_reconfigure_handle()]
    assert reconfigure([group], 7, handles) == [None]
    (error,) = reconfigure([group], 8, handles)
    assert isinstance(error, ValueError) and "the handle of this group was used already" in str(error)
    assert reconfigure([group], 9, [group.get_reconfigure_handle()]) == [None]
    group.shutdown()


def test_an_nccl_that_cannot_revoke_is_named(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Nccl2, "supports_reconfigure", False)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    group = ProcessGroupNCCL(implementation="nccl2")
    with pytest.raises(RuntimeError, match=r"needs NCCL 2\.28 or newer.* this is NCCL 2\.27\.5"):
        group.configure(meeting(store), "replica", 0, 1)


def test_without_a_device_no_backend_is_made(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Destroying a backend that was created without a device would end the process."""

    def no_device() -> int:
        raise RuntimeError("Found no NVIDIA driver")

    monkeypatch.setattr(torch.cuda, "current_device", no_device)
    with pytest.raises(RuntimeError, match="no NVIDIA driver"):
        ProcessGroupNCCL(implementation="nccl2").configure(meeting(store), "replica", 0, 1)
    assert Nccl2.made == []


# Jobs with both backends


def test_only_handles_of_the_newer_backend_name_it() -> None:
    """Handles of the older backend equal those of upstream, which has only that backend."""
    for group, expected in (
        (ProcessGroupNCCL(implementation="nccl2"), "nccl2"),
        (ProcessGroupNCCL(), None),
        (ProcessGroupBabyNCCL(), None),
    ):
        handle = group.get_reconfigure_handle()
        assert Handle.decode(handle).implementation == expected
        assert ("implementation" in handle) == (expected is not None)
        group.shutdown()


def test_a_quorum_with_both_backends_is_refused_on_every_rank_at_once() -> None:
    groups = [ProcessGroupNCCL(TIMEOUT, implementation=name) for name in ("legacy", "nccl2", "legacy")]
    handles = [group.get_reconfigure_handle() for group in groups]
    for rank, expected in enumerate(("'legacy' here, 'nccl2' in rank 1", "'nccl2' here, 'legacy' in rank 0") * 2):
        if rank < 3:
            with pytest.raises(ValueError, match=expected + ".*TORCHFT_NCCL_IMPLEMENTATION"):
                plan_rendezvous(handles, handles[rank], 0)
    assert plan_rendezvous([handles[0], handles[2]], handles[2], 0).rank == 1
    assert plan_rendezvous([handles[1]], handles[1], 0).world_size == 1
    assert all(backend.reconfigured_with is None for backend in Nccl2.made)
    for group in groups:
        group.shutdown()


def test_a_handle_of_a_later_release_is_accepted() -> None:
    handle = Handle.decode('{"id": "a", "store": "host:1", "implementation": 3}')
    assert handle.implementation is None


def test_over_a_store_the_later_rank_names_the_difference(store: TCPStore) -> None:
    where = meeting(store)
    create_store_client(f"{where}/implementation", TIMEOUT).set("1", "legacy")
    began = time.monotonic()
    with pytest.raises(ValueError, match="'nccl2' here, 'legacy' in rank 1"):
        ProcessGroupNCCL(TIMEOUT, implementation="nccl2").configure(where, "replica", 0, 2)
    assert time.monotonic() - began < TIMEOUT.total_seconds() / 2
    assert Nccl2.made == []


def test_over_a_store_earlier_ranks_name_the_difference_when_they_cannot_connect(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("nccl2", "legacy")

    def errors(timeout: timedelta) -> list[Any]:
        def no_peer(self: object, own: dist.Store, rank: int, world_size: int) -> Any:
            own.wait(["never"], timeout)

        def configure(rank: int) -> None:
            ProcessGroupNCCL(timeout, implementation=names[rank]).configure(where, "replica", rank, 2)

        where = meeting(store)
        monkeypatch.setattr(nccl.ProcessGroupNCCL, "_create_legacy", no_peer)
        return in_threads([lambda rank=rank: configure(rank) for rank in range(2)], 2 * TIMEOUT)

    results = errors(timedelta(seconds=2))
    if any(not isinstance(error, ValueError) for error in results):  # a rank was too late
        results = errors(TIMEOUT)
    for rank, error in enumerate(results):
        assert isinstance(error, ValueError) and f"{names[rank]!r} here, {names[1 - rank]!r}" in str(error), error


def test_another_error_is_unchanged(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> Any:
        raise RuntimeError("no route")

    monkeypatch.setattr(nccl.ProcessGroupNCCL, "_create_legacy", fails)
    with pytest.raises(RuntimeError, match=r"^no route$"):
        ProcessGroupNCCL(TIMEOUT).configure(meeting(store), "replica", 0, 2)


# PyTorch's own backend, as far as it works without a device

PYTORCH = """
import os, torch
from datetime import timedelta
import torch.distributed as dist
from torch._C._distributed_c10d import ReconfigureOptions
store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
backends = []
for rank in range(2):
    opts = dist.ProcessGroupNCCL.Options()
    opts.enable_reconfigure = True
    backends.append(dist.ProcessGroupNCCL2(dist.PrefixStore("a", store), rank, 2, opts))
handles = [backend.get_reconfigure_handle() for backend in backends]
print([backend.supports_reconfigure for backend in backends], len(set(handles)))
print([handle.split(":")[:2] for handle in handles], str(store.port) in handles[0])
for given in ([handles[0], handles[0]], handles[1:]):
    options = ReconfigureOptions()
    options.handles, options.uuid = given, 7
    try:
        backends[0].reconfigure(options)
    except Exception as e:
        print(type(e).__name__, str(e).splitlines()[0])
print(backends[0].get_error().name)
# A backend that is made before it has a store
from torchft.process_group import nccl2
ranks = [nccl2.prepare() for _ in range(2)]
options = ReconfigureOptions()
options.uuid, options.timeout = 8, timedelta(seconds=60)
options.handles = [one.handle for one in ranks]
print(len(set(options.handles)))
for one in ranks:
    one.store.there = store
    try:
        one.backend.reconfigure(options)
    except Exception as e:
        print(type(e).__name__, str(e).splitlines()[0], flush=True)
os._exit(0)  # without a device they cannot be destroyed
"""


@pytest.mark.no_device
def test_pytorchs_nccl2_behaves_as_torchft_expects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    if not hasattr(dist, "ProcessGroupNCCL2"):
        pytest.skip("this PyTorch has no ProcessGroupNCCL2")
    done = run_python(PYTORCH)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "[True, True] 2"
    assert lines[1] == "[['nccl2', '0'], ['nccl2', '1']] True"
    assert "must be unique" in lines[2] and "not part of the new communicator" in lines[3]
    assert lines[4:6] == ["SUCCESS", "2"]
    # Rank 1 has got the id of rank 0's communicator through the store, otherwise it would name a timeout.
    assert len(lines) == 8 and all("CUDA" in line for line in lines[6:]), lines
