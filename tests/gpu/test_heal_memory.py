"""A group heals on a device: into its own tensors, with little additional device memory.

Both groups may use the same device. If each has its own, the target must not allocate memory on the source's
device.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

from tests.gpu.device import DEVICE
from tests.integration.cluster import DEADLINE, Rank
from tests.integration.heal_memory import check_heal
from torchft.checkpointing import CheckpointTransport, HTTPTransport
from torchft.checkpointing.client.target import TargetState
from torchft.checkpointing.pg_transport import PGTransport
from torchft.process_group import ProcessGroup, ProcessGroupGloo

WIDTH = 4096  # 67 MB per matrix, 805 MB in all


def http(rank: Rank) -> CheckpointTransport[Any]:
    return HTTPTransport(DEADLINE, 0)


class InUpstreamFormat(HTTPTransport[Any]):
    """A source that cannot copy its state on a device to host memory."""

    def __init__(self, timeout: timedelta, num_chunks: int) -> None:
        super().__init__(timeout, num_chunks)
        self._native.start = lambda: False  # type: ignore[method-assign]


def http_without_a_copy(rank: Rank) -> CheckpointTransport[Any]:
    return InUpstreamFormat(DEADLINE, 0)


def by_group(rank: Rank) -> CheckpointTransport[Any]:
    return PGTransport(rank.pg, DEADLINE, torch.device("cpu"))


def gloo(group: int) -> ProcessGroup:
    return ProcessGroupGloo(timeout=DEADLINE)


@pytest.mark.parametrize("transport", [http, http_without_a_copy, by_group])
@pytest.mark.parametrize("in_background", [True, False], ids=["asynchronous quorum", "synchronous quorum"])
@pytest.mark.parametrize("has_stepped", [True, False], ids=["own Adam", "fresh Adam"])
@pytest.mark.parametrize("second", [0, 1], ids=["one device", "two devices"])
def test_a_heal_takes_no_second_copy_on_the_device(
    transport: Callable[[Rank], CheckpointTransport[Any]], in_background: bool, has_stepped: bool, second: int
) -> None:
    if second >= torch.cuda.device_count():
        pytest.skip("needs two devices")
    devices = DEVICE, torch.device("cuda", second)
    check_heal(gloo, transport, devices, width=WIDTH, in_background=in_background, has_stepped=has_stepped)


@pytest.mark.parametrize("writable", [None, True, False], ids=["no target", "in place", "settled"])
@pytest.mark.parametrize("source", [HTTPTransport[Any], InUpstreamFormat], ids=["native", "upstream format"])
def test_a_sparse_tensor_heals(source: type[HTTPTransport[Any]], writable: bool | None) -> None:
    """A sparse tensor is sent as a pickle. The target receives it in host memory, and its own function moves
    it to the device.
    """
    state = {"s": torch.eye(300, device=DEVICE).to_sparse(), "w": torch.full((300,), 2.0, device=DEVICE)}
    own = {"s": torch.zeros(300, 300, device=DEVICE).to_sparse(), "w": torch.zeros(300, device=DEVICE)}
    target = None if writable is None else TargetState(lambda: own, writable)
    ends = source(DEADLINE, 0), HTTPTransport[Any](DEADLINE, 0)
    try:
        ends[0].send_checkpoint([1], 1, state, DEADLINE)
        got = ends[1].recv_checkpoint(0, ends[0].metadata(), 1, DEADLINE, target=target)
    finally:
        for end in ends:
            end.shutdown()
    if target is not None:
        got = target.settle(got)
        assert got["w"] is own["w"]
    assert got["w"].device == DEVICE and bool((got["w"] == 2).all())
    assert got["s"].is_sparse and torch.equal(got["s"].to_dense().cpu(), torch.eye(300))
