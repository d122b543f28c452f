"""Collectives that send 8-bit codes: a quarter of the bytes of float32.

Each rank sends each peer the codes of one slice of its tensors, adds up the slices that it receives, and (in
an allreduce) sends the codes of the sum to all peers. So values are rounded twice in an allreduce and once in
a reduce_scatter; `torchft.quantization` has the error bounds of one rounding. With n ranks the error of an
allreduce is at most the sum of the errors of the n inputs, plus the error of the sum. A bound depends on the
largest value in a block, which is 2048 neighboring elements of a tensor. All ranks get the same bits.

NaN and infinities in any input become NaN in the result; only that element is affected.

All ranks must pass the same shapes and dtypes in the same order, and have the same
TORCHFT_QUANTIZATION_FORMAT. With Gloo this is compared before tensors are sent: a ValueError names the
difference.
"""

from __future__ import annotations

import math
from typing import Optional, Union

import torch
from torch.distributed import ProcessGroup as BaseProcessGroup
from torch.distributed import Work
from torch.distributed.distributed_c10d import AllreduceOptions, ReduceScatterOptions

from torchft._quantization.exchange import Exchange, start
from torchft._quantization.layout import check_tensors, format_from_env
from torchft.quantization import (
    check_reduce_op,
    fused_dequantize_from_fp8,
    fused_quantize_into_fp8,
    fused_reduce_fp8,
    reduce_into,
    reduce_op_name,
)
from torchft.work import AnyReduceOp, _DummyWork

__all__ = [
    "allocate_reduce_scatter_output",
    "allreduce_quantized",
    "get_padded_sizes",
    "reduce_scatter_quantized",
]


def check_quantizable(tensor: torch.Tensor, reduce_op: AnyReduceOp) -> None:
    """Refuses arguments that `allreduce_quantized` refuses, before any communication.

    Raises:
        ValueError: a tensor or a reduction that cannot be quantized.
    """
    check_tensors("tensor", [tensor])
    check_reduce_op(reduce_op, 1)


def get_padded_sizes(tensors: list[torch.Tensor], world_size: int) -> list[torch.Size]:
    """The shapes of tensors whose first dimension is padded to a multiple of the number of ranks.

    Args:
        tensors: tensors of one dimension or more; one of shape (n,) counts as (n, 1).
        world_size: number of ranks.

    Raises:
        ValueError: a tensor without dimensions, or world_size below 1.
    """
    if world_size < 1:
        raise ValueError(f"world_size={world_size}: at least 1 is needed")
    sizes = []
    for i, tensor in enumerate(tensors):
        if tensor.dim() == 0:
            raise ValueError(f"tensors[{i}] has no dimension to scatter along: at least one is needed")
        rows, *rest = tensor.shape
        sizes.append(torch.Size((math.ceil(rows / world_size) * world_size, *(rest or [1]))))
    return sizes


def allocate_reduce_scatter_output(
    tensors: list[torch.Tensor], world_size: int
) -> tuple[torch.Tensor, list[torch.Size]]:
    """Allocates the output of one rank of a reduce_scatter.

    Args:
        tensors: at least one; all of one dtype and on one device.
        world_size: number of ranks.

    Returns:
        A flat tensor for this rank's rows of all tensors, one after the other, and the padded sizes of the
        tensors.

    Raises:
        ValueError: there are no tensors, they have several dtypes or devices, or one has no dimensions.
    """
    if not tensors:
        raise ValueError("tensors is empty: at least one is needed")
    kinds = sorted({f"{tensor.dtype} on {tensor.device}" for tensor in tensors})
    if len(kinds) > 1:
        raise ValueError(f"tensors are {' and '.join(kinds)}: one dtype on one device is needed")
    sizes = get_padded_sizes(tensors, world_size)
    numel = sum(size.numel() for size in sizes) // world_size
    return torch.empty(numel, dtype=tensors[0].dtype, device=tensors[0].device), sizes


def allreduce_quantized(
    tensors: list[torch.Tensor],
    opts: Union[AllreduceOptions, AnyReduceOp],
    process_group: BaseProcessGroup,
    sync_stream: Optional[torch.Stream] = None,
) -> Work:
    """Reduces tensors over all ranks, in place. A rank without peers leaves them as they are.

    Args:
        tensors: float32, float16 or bfloat16, any shapes, on one device.
        opts: SUM or AVG.
        process_group: a process group of torchft, or a native one.
        sync_stream: stream for the work on a device; default: one that all quantized collectives on the
            device share.

    Returns:
        Work whose future gives ``tensors``. They must not be touched until it is done.

    Raises:
        ValueError: a tensor that cannot be quantized, or another reduction.
    """
    check_tensors("tensors", tensors)
    fmt = format_from_env()
    op = opts.reduceOp if isinstance(opts, AllreduceOptions) else opts
    ranks = process_group.size()
    check_reduce_op(op, ranks)
    if ranks == 1:
        return _DummyWork(tensors)

    def run(exchange: Exchange) -> None:
        buffer = exchange.scatter(fused_quantize_into_fp8(tensors, ranks, fmt))
        fused_reduce_fp8(tensors, buffer, ranks, exchange.rank, op, fmt)
        fused_dequantize_from_fp8(tensors, exchange.gather(buffer), ranks, fmt)

    return start(
        run, f"allreduce {fmt.value} {reduce_op_name(op)}", tensors, tensors, process_group, sync_stream
    )


def reduce_scatter_quantized(
    output: torch.Tensor,
    inputs: list[torch.Tensor],
    opts: Union[ReduceScatterOptions, AnyReduceOp],
    process_group: BaseProcessGroup,
    sync_stream: Optional[torch.Stream] = None,
) -> Work:
    """Reduces tensors over all ranks and leaves each rank its rows of them.

    Args:
        output: a tensor from `allocate_reduce_scatter_output`: this rank's rows of all inputs, flat, one
            after the other.
        inputs: float32, float16 or bfloat16, of one dimension or more, on one device. Their first dimensions
            are cut into as many parts as there are ranks, padded with zeros to the sizes of
            `get_padded_sizes`.
        opts: SUM or AVG.
        process_group: a process group of torchft, or a native one.
        sync_stream: stream for the work on a device; default: one that all quantized collectives on the
            device share.

    Returns:
        Work whose future gives ``output``.

    Raises:
        ValueError: a tensor that cannot be quantized, an output of another size, or another reduction.
    """
    check_tensors("inputs", inputs)
    check_tensors("output", [output])
    fmt = format_from_env()
    op = opts.reduceOp if isinstance(opts, ReduceScatterOptions) else opts
    ranks = process_group.size()
    divisor = check_reduce_op(op, ranks)
    sizes = get_padded_sizes(inputs, ranks)
    rows = [size.numel() // ranks for size in sizes]
    if output.numel() != sum(rows) or not output.is_contiguous():
        raise ValueError(
            f"output of shape {tuple(output.shape)} has {output.numel()} elements: this rank's rows of all "
            f"inputs need {sum(rows)}, contiguous"
        )

    def run(exchange: Exchange) -> None:
        padded = [_pad(tensor.detach(), size) for tensor, size in zip(inputs, sizes)]
        buffer = exchange.scatter(fused_quantize_into_fp8(padded, ranks, fmt))
        reduce_into(parts, buffer, divisor, ranks, fmt)

    parts = list(output.detach().view(-1).split(rows))
    if ranks == 1:
        for part, tensor in zip(parts, inputs):
            part.copy_(tensor.detach().reshape(-1))
        return _DummyWork(output)
    return start(
        run,
        f"reduce_scatter {fmt.value} {reduce_op_name(op)}",
        [*inputs, output],
        output,
        process_group,
        sync_stream,
    )


def _pad(tensor: torch.Tensor, size: torch.Size) -> torch.Tensor:
    missing = size.numel() - tensor.numel()
    flat = tensor.reshape(-1)
    return torch.cat([flat, flat.new_zeros(missing)]) if missing else flat
