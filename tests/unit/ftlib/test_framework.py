"""Native groups of PyTorch in FTLib: the operations that an abort ends, and the errors that they detect."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from tests.promises import ABORT_S, within
from tests.unit.process_group.backends import NATIVE, native
from torchft.ftlib.framework import ProcessGroupFramework

pytestmark = pytest.mark.skipif(not NATIVE, reason="needs PyTorch >= 2.14, whose groups can be reconfigured")


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def members(store: TCPStore) -> list[ProcessGroupFramework]:
    """Two connected members."""
    made = [ProcessGroupFramework(native(store, rank)) for rank in range(2)]
    rebuild(made, f"localhost:{store.port}/first")
    return made


def rebuild(members: list[ProcessGroupFramework], address: str) -> None:
    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(lambda rank: members[rank].rebuild(rank, 2, address), range(2)))


def test_an_abort_ends_a_collective_of_a_native_group(members: list[ProcessGroupFramework]) -> None:
    first, silent = members
    begun = threading.Event()

    def average() -> None:
        work = first.start_average(torch.ones(1))
        begun.set()
        first.finish_average(work)

    with ThreadPoolExecutor(1) as pool:
        averaged = pool.submit(average)
        try:
            assert begun.wait(60)
            first.abort()
            with pytest.raises(RuntimeError):
                averaged.result(within(ABORT_S))
        finally:
            silent.abort()


def test_a_native_group_is_rebuilt_after_an_abort(
    members: list[ProcessGroupFramework], store: TCPStore
) -> None:
    for member in members:
        member.abort()
    rebuild(members, f"localhost:{store.port}/second")
    tensors = [torch.tensor([1.0]), torch.tensor([3.0])]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda rank: members[rank].allreduce_average([tensors[rank]]), range(2)))
    assert [tensor.tolist() for tensor in tensors] == [[2.0], [2.0]]


def test_an_error_of_a_native_group_is_raised(
    members: list[ProcessGroupFramework], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like a process group on a device, whose wait ends when an operation is queued."""
    first, _ = members
    first.abort()
    monkeypatch.setattr(dist.Work, "wait", lambda *_: True)
    with pytest.raises(RuntimeError, match="was aborted"):
        first._wait(dist.Work())
