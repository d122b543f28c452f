"""Quantized collectives on the test device, for which there are no Triton kernels: PyTorch's operators are
used.
"""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
from torch.distributed import ReduceOp, TCPStore, Work

from tests.late import load
from tests.unit.process_group.ranks import meeting
from torchft._quantization.exchange import start
from torchft.collectives import allocate_reduce_scatter_output, allreduce_quantized, reduce_scatter_quantized
from torchft.process_group import ProcessGroup, ProcessGroupGloo
from torchft.quantization import FORMAT_ENV

load()
from tests.late.group import ProcessGroupLate, together  # noqa: E402
from tests.late.one_rank import Group  # noqa: E402

TIMEOUT = timedelta(seconds=20)


def late_group() -> ProcessGroup:
    return ProcessGroupLate(timeout=TIMEOUT)


def gloo_group() -> ProcessGroup:
    return ProcessGroupGloo(timeout=TIMEOUT)


def inputs(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(700, 7, generator=generator), torch.randn(13, generator=generator).bfloat16()]


def reduced_on(kind: str) -> list[list[torch.Tensor]]:
    """Returns what both ranks get, over a process group for the given device type."""

    def rank(r: int, pg: ProcessGroup) -> list[torch.Tensor]:
        tensors = [tensor.to(kind) for tensor in inputs(r)]
        work = allreduce_quantized(tensors, ReduceOp.SUM, pg)
        for tensor in work.get_future().wait():
            tensor.mul_(2)  # ordered behind the collective on this stream
        output, _ = allocate_reduce_scatter_output(tensors[:1], 2)
        reduce_scatter_quantized(output, tensors[:1], ReduceOp.AVG, pg).wait()
        return [tensor.cpu() for tensor in (*tensors, output)]

    return together(rank, make=late_group if kind == "late" else gloo_group)


@pytest.mark.parametrize("fmt", ["fp8", "int8"])
def test_the_bits_are_those_of_the_cpu(late, monkeypatch: pytest.MonkeyPatch, fmt: str) -> None:
    """With any durations of the operators and the exchanges."""
    monkeypatch.setenv(FORMAT_ENV, fmt)
    late.delays(5, 0, 500)
    for on_device, on_cpu in zip(reduced_on("late"), reduced_on("cpu")):
        assert all(map(torch.equal, on_device, on_cpu))


def test_gloo_copies_tensors_of_the_device_through_the_host(late) -> None:
    late.delays(5, 0, 500)

    def rank(r: int, pg: ProcessGroup) -> list[float]:
        tensor = torch.full((5000,), 1.0, device="late")
        tensor.add_(r)
        allreduce_quantized([tensor], ReduceOp.SUM, pg).wait()
        return tensor.unique().tolist()

    assert together(rank, make=gloo_group) == [[3.0], [3.0]]


def test_the_order_is_that_of_the_tensors_device(late) -> None:
    """The caller's current device is a different one."""

    def rank(r: int, pg: ProcessGroup) -> list[float]:
        current = torch.accelerator.current_device_index()
        tensor = torch.ones(5000, device="late")
        torch.accelerator.set_device_index(current + 2)
        late.enqueue(lambda: time.sleep(0.1), torch.accelerator.current_stream(tensor.device))
        tensor.add_(r)
        allreduce_quantized([tensor], ReduceOp.SUM, pg).wait()
        read = tensor + 0
        torch.accelerator.set_device_index(current)
        return read.unique().tolist()

    assert together(rank, make=late_group) == [[3.0], [3.0]]


def test_memory_of_a_quantized_collective_is_not_used_again_early(late) -> None:
    """The caller drops the tensor at once. The next allocation on its stream must not get the memory."""
    tensors = [torch.ones(5000, device="late")]
    stream, address = torch.Stream("late"), tensors[0].data_ptr()
    with late.held(stream):
        work = start(lambda _: tensors[0].mul_(2), "double", tensors, None, Group(), stream)
        tensors.clear()
        assert torch.zeros(5000, device="late").data_ptr() != address
    work.synchronize()


def doubling(group: ProcessGroup, stream: torch.Stream) -> tuple[torch.Tensor, Work]:
    tensor = torch.ones(5000, device="late")
    return tensor, start(lambda _: tensor.mul_(2), "double", [tensor], [tensor], group, stream)


def test_operations_share_the_stream_of_their_device(late) -> None:
    """A new stream for each one would spread the allocator over all streams of PyTorch's pool."""
    streams = []
    for index in (0, 0, 1):
        tensor = torch.ones(5, device=f"late:{index}")
        note = lambda _: streams.append(torch.accelerator.current_stream(tensor.device))  # noqa: E731, B023
        start(note, "note", [tensor], None, Group(), None).wait()
    assert streams[0] == streams[1] and streams[2].device_index == 1


def test_it_is_in_flight_until_the_device_has_finished(late) -> None:
    """Another stream that waits for it, or for its future, is ordered behind it."""
    own, other = torch.Stream("late"), torch.Stream("late")
    with late.held(own):
        tensor, work = doubling(Group(), own)
        with other:
            work.wait()
            waited = tensor + 1
        read = work.get_future().then(lambda _: tensor + 2)
        assert late.pending(other) and not work.is_completed() and not work.is_success()
    other.synchronize()
    assert work.is_completed() and work.is_success()
    assert waited.unique().tolist() == [3.0] and read.wait().unique().tolist() == [4.0]


@pytest.mark.parametrize("how", ["aborted", "new peers"])
def test_a_collective_that_its_group_ended_has_failed(late, how: str) -> None:
    own, group = torch.Stream("late"), Group()
    with late.held(own):
        _, work = doubling(group, own)
        if how == "aborted":
            group.abort()
        else:
            store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
            group.configure(meeting(store), "replica", 0, 1)
    own.synchronize()
    assert not work.is_success()
    with pytest.raises(RuntimeError, match="ended with its group, which was aborted or has new peers"):
        work.wait()
