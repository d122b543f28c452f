from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from torch.distributed import ReduceOp, TCPStore

from tests.gpu.device import DEVICE
from tests.unit.process_group.ranks import TIMEOUT, connect, on_ranks
from tests.unit.quantization.interpreted import compare_all
from torchft._quantization.exchange import _StreamWork
from torchft.collectives import allreduce_quantized
from torchft.process_group import ProcessGroupGloo, ProcessGroupNCCL
from torchft.quantization import fused_dequantize_from_fp8, fused_quantize_into_fp8, fused_reduce_fp8


def test_kernels_give_the_bits_of_plain_pytorch() -> None:
    pytest.importorskip("triton", reason="needs Triton")
    assert compare_all(DEVICE) > 100


def test_device_and_host_agree() -> None:
    tensor = torch.randn(10_001)
    assert torch.equal(
        fused_quantize_into_fp8([tensor.to(DEVICE)], 3).cpu(), fused_quantize_into_fp8([tensor], 3)
    )


def test_gloo_with_tensors_on_a_device(store: TCPStore) -> None:
    groups = [ProcessGroupGloo(timeout=TIMEOUT) for _ in range(2)]
    connect(groups, store)
    tensors = [torch.full((5000,), 1.0 + rank, device=DEVICE) for rank in range(2)]

    def run(rank: int) -> None:
        work = allreduce_quantized([tensors[rank]], ReduceOp.SUM, groups[rank])
        assert work.get_future().wait()[0] is tensors[rank]

    on_ranks(2, run)
    assert [t.unique().tolist() for t in tensors] == [[3.0], [3.0]]
    for group in groups:
        group.shutdown()


def test_nccl_queues_everything_on_a_stream(store: TCPStore) -> None:
    """One rank, which runs the complete exchange nevertheless. With two: test_ranks.py."""
    group = ProcessGroupNCCL(timeout=timedelta(seconds=30))
    connect([group], store)
    tensor = torch.full((5000,), 3.0, device=DEVICE)

    def run(exchange) -> None:  # type: ignore[no-untyped-def]
        buffer = exchange.scatter(fused_quantize_into_fp8([tensor], 1))
        fused_reduce_fp8([tensor], buffer, 1, exchange.rank)
        tensor.zero_()
        fused_dequantize_from_fp8([tensor], exchange.gather(buffer), 1)

    work = _StreamWork(run, [tensor], [tensor], group, None)
    assert work.wait() and work.get_future().wait()[0] is tensor
    assert tensor.unique().tolist() == [3.0]
    group.shutdown()
