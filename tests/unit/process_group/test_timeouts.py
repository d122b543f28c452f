"""Errors of Gloo's timeouts end with "timed out", after PyTorch's own text, in each kind of group."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any, Callable, Iterator

import pytest
import torch
from torch.distributed import DistStoreError, ReduceOp, TCPStore
from torch.distributed.distributed_c10d import AllgatherOptions, BarrierOptions, ReduceScatterOptions

from tests.unit.process_group.backends import NATIVE, Backend, backends, gloo
from tests.unit.process_group.ranks import connect, meeting, natives
from torchft.process_group import (
    ErrorSwallowingProcessGroupWrapper,
    ProcessGroupGloo,
    reconfigure_with_store,
)
from torchft.process_group._errors import named_timeout
from torchft.process_group.native import reconfigure_group
from torchft.process_group.reconfigure import ReconfigureOptions

SHORT = timedelta(seconds=0.1)
OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "allreduce": lambda group: group.allreduce([torch.ones(2)], ReduceOp.SUM),
    "allgather": lambda group: group.allgather([[torch.ones(2)] * 2], [torch.ones(2)], AllgatherOptions()),
    "barrier": lambda group: group.barrier(BarrierOptions()),
    "reduce_scatter": lambda group: group.reduce_scatter(
        [torch.ones(2)], [[torch.ones(2)] * 2], ReduceScatterOptions()
    ),
    "recv": lambda group: group.recv([torch.ones(2)], 1, 7),
}
# Groups that use Gloo. Other wrappers pass on the errors that these raise.
GROUPS = backends(alone=False, wrappers=["managed_native"])


@pytest.fixture
def groups(request: pytest.FixtureRequest, store: TCPStore) -> Iterator[list[Any]]:
    backend: Backend = request.param
    if backend.missing is not None:
        pytest.skip(backend.missing)
    if request.node.callspec.params.get("operation") == "reduce_scatter" and not backend.reduces_and_scatters:
        pytest.skip("Gloo has reduce_scatter since PyTorch 2.14")
    groups = [backend.make(store, rank) for rank in range(2)]
    connect(groups, store)
    yield groups
    for group in groups:
        group.abort()
        group.shutdown()


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("groups", [p for p in GROUPS if not p.values[0].swallows], indirect=True)
def test_an_operation_whose_peer_does_not_join(groups: list[Any], operation: str) -> None:
    groups[0].set_timeout(SHORT)
    work = OPERATIONS[operation](groups[0])
    with pytest.raises(RuntimeError, match="timed out"):
        work.wait(SHORT) if operation == "recv" else work.wait()
    assert work.exception() is None or "timed out" in str(work.exception())


@pytest.mark.parametrize("groups", [p for p in GROUPS if not p.values[0].swallows], indirect=True)
def test_the_future_of_such_an_operation(groups: list[Any]) -> None:
    groups[0].set_timeout(SHORT)
    work = groups[0].allreduce([torch.ones(2)], ReduceOp.SUM)
    with pytest.raises(RuntimeError, match="timed out"):
        work.get_future().wait()


def test_the_error_that_an_error_swallowing_group_keeps(store: TCPStore) -> None:
    group, peer = ErrorSwallowingProcessGroupWrapper(gloo()), gloo()
    connect([group, peer], store)
    group.set_timeout(SHORT)
    group.allreduce([torch.ones(2)], ReduceOp.SUM).wait()
    assert re.match(r".*Timed out waiting .*timed out", str(group.error()), re.DOTALL)
    group.shutdown()
    peer.shutdown()


@pytest.mark.usefixtures("unhurried_connections")
def test_a_peer_that_never_connects(store: TCPStore) -> None:
    group = ProcessGroupGloo(timeout=SHORT)
    with pytest.raises(RuntimeError, match=r"^wait timeout after 100ms, .*timed out"):
        group.configure(meeting(store), "alone", 0, 2)
    with pytest.raises(RuntimeError, match=r"^wait timeout after 100ms, .*timed out"):
        reconfigure_with_store(group, meeting(store), 0, 2, SHORT)


@pytest.mark.skipif(not NATIVE, reason="needs PyTorch >= 2.14, whose groups can be reconfigured")
def test_a_peer_that_never_connects_to_a_native_group(store: TCPStore) -> None:
    first, other = natives(store, 2)
    opts = ReconfigureOptions()
    opts.handles, opts.uuid = [group.get_reconfigure_handle() for group in (first, other)], 1
    opts.timeout = SHORT
    with pytest.raises(RuntimeError, match="timed out"):
        reconfigure_group(first, opts)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "[buffer.cc:78] Timed out waiting 5ms for recv",
            "[buffer.cc:78] Timed out waiting 5ms for recv (timed out)",
        ),
        ("wait timeout after 5ms, keys: /0/1", "wait timeout after 5ms, keys: /0/1 (timed out)"),
        ("Application timeout caused pair closure", "Application timeout caused pair closure (timed out)"),
        (
            "Gloo connectFullMesh failed with [pair.h:311] Connect timeout [none]",
            "Gloo connectFullMesh failed with [pair.h:311] Connect timeout [none] (timed out)",
        ),
        ("Operation timed out!", "Operation timed out!"),
        ("Connection closed by peer", "Connection closed by peer"),
    ],
)
def test_pytorchs_text_comes_first(text: str, expected: str) -> None:
    error = named_timeout(DistStoreError(text))
    assert (type(error), str(error)) == (DistStoreError, expected)


def test_an_error_of_another_kind_is_unchanged() -> None:
    error = ValueError("timeout=0: a timedelta above zero is needed")
    assert named_timeout(error) is error
