"""8-bit codes for tensors that are sent between replica groups.

Tensors are cut into one slice for each rank, and these into blocks of BLOCK_SIZE_T elements. A block has a
scale, a power of two, and each element an 8-bit code: its value divided by the scale, rounded to even. (The
Microscaling formats of Rouhani et al. 2023, "Microscaling Data Formats for Deep Learning", do so with smaller
blocks.) Scaling by a power of two is exact, so every device computes the same codes, with Triton and without.

Formats, chosen by TORCHFT_QUANTIZATION_FORMAT, the same in all groups of a job:

========  ==================================  ==========================================================
format    codes                               \\|decoded - value\\| of finite values, L the block's largest
========  ==================================  ==========================================================
``fp8``   float8 e4m3, the default            at most max(\\|value\\| / 16, L / 2**17, 2**-110)
``int8``  integers from -127 to 127           at most max(L / 127, 2**-101)
========  ==================================  ==========================================================

Codes of fp8 are computed in integer arithmetic, so devices without fp8 can do it. Both formats have a code
for NaN, which also encodes infinities: a value that is not finite always decodes to NaN. The other elements
of its block keep the error bound. Values above 2**128 * (1 - 2**-5) may decode to infinity.
"""

from __future__ import annotations

import warnings
from typing import Any, Optional, Sequence

import torch
from torch.distributed import ReduceOp

from torchft._quantization import plain
from torchft._quantization.layout import (
    BLOCK,
    FORMAT_ENV,
    SCALE_BYTES,
    Format,
    SliceLayout,
    check_tensors,
    format_from_env,
    make_layout,
)
from torchft.work import AnyReduceOp

__all__ = [
    "BLOCK_SIZE_T",
    "FORMAT_ENV",
    "SCALE_DTYPE",
    "SCALE_DTYPE_BYTES",
    "Format",
    "fused_dequantize_from_fp8",
    "fused_quantize_into_fp8",
    "fused_reduce_fp8",
]

SCALE_DTYPE: torch.dtype = torch.float32
SCALE_DTYPE_BYTES: int = SCALE_BYTES
BLOCK_SIZE_T: int = BLOCK


def __getattr__(name: str) -> Any:
    if name in ("SCALE_TL_DTYPE", "SCALE_TL_DTYPE_BYTES"):
        import triton.language as tl  # slow to import, and not installed on every host

        return tl.float32 if name == "SCALE_TL_DTYPE" else tl.constexpr(SCALE_BYTES)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def fused_quantize_into_fp8(
    inputs: list[torch.Tensor], all_reduce_group_size: int, format: Optional[Format] = None
) -> torch.Tensor:
    """Quantizes tensors into one buffer, with a slice for each rank.

    Args:
        inputs: float32, float16 or bfloat16, any shape, on one device. Each slice has ceil(n /
            all_reduce_group_size) elements of a tensor of n elements, in the order of the flattened tensor.
        all_reduce_group_size: number of slices.
        format: format of the codes; default: TORCHFT_QUANTIZATION_FORMAT.

    Returns:
        The buffer: uint8, one-dimensional, with slices of equal length.

    Raises:
        ValueError: a tensor cannot be quantized; the text names it.
    """
    layout = _layout(inputs, all_reduce_group_size)
    device = inputs[0].device if inputs else torch.device("cpu")
    buffer = torch.empty(layout.nbytes, dtype=torch.uint8, device=device)
    for gap in layout.padding:
        buffer.view(layout.slices, -1)[:, gap].zero_()
    with torch.no_grad():
        flat = [tensor.detach().reshape(-1) for tensor in inputs]
        _implementation(device).quantize(flat, buffer, layout, format or format_from_env())
    return buffer


def fused_dequantize_from_fp8(
    inputs: list[torch.Tensor],
    output: torch.Tensor,
    all_reduce_group_size: int,
    format: Optional[Format] = None,
) -> None:
    """Writes the values of a buffer into tensors.

    Args:
        inputs: the tensors to write to, with the shapes from which the buffer was made.
        output: the buffer, which is only read.
        all_reduce_group_size: number of its slices.
        format: format of its codes.

    Raises:
        ValueError: a tensor cannot be quantized, or the buffer has another size or type than these tensors
            need.
    """
    layout = _layout(inputs, all_reduce_group_size)
    _check_buffer(output, layout)
    with torch.no_grad():
        flat = [tensor.detach().contiguous().view(-1) for tensor in inputs]
        _implementation(output.device).dequantize(flat, output, layout, format or format_from_env())
        for tensor, values in zip(inputs, flat):
            if not tensor.is_contiguous():
                tensor.detach().copy_(values.view(tensor.shape))


def fused_reduce_fp8(
    inputs: list[torch.Tensor],
    output: torch.Tensor,
    all_reduce_group_size: int,
    all_reduce_rank: int,
    reduce_op: AnyReduceOp = ReduceOp.SUM,
    format: Optional[Format] = None,
) -> None:
    """Adds up all slices of a buffer in float32, in their order, and quantizes the result into one of them.

    Args:
        inputs: tensors with the shapes from which the buffer was made; only the shapes count.
        output: the buffer.
        all_reduce_group_size: number of its slices.
        all_reduce_rank: the slice that gets the result.
        reduce_op: SUM, or AVG, which divides by the number of slices.
        format: format of its codes.

    Raises:
        ValueError: another reduce_op, no such slice, or the buffer has another size or type than these
            tensors need.
    """
    divisor = check_reduce_op(reduce_op, all_reduce_group_size)
    if not 0 <= all_reduce_rank < all_reduce_group_size:
        raise ValueError(f"all_reduce_rank={all_reduce_rank}: allowed are 0 to {all_reduce_group_size - 1}")
    layout = _layout(inputs, all_reduce_group_size)
    _check_buffer(output, layout)
    with torch.no_grad():
        _implementation(output.device).reduce(
            output, layout, format or format_from_env(), divisor, all_reduce_rank, None
        )


def reduce_into(
    outputs: Sequence[torch.Tensor], buffer: torch.Tensor, divisor: int, slices: int, format: Format
) -> None:
    """Sums all slices of a buffer, as fused_reduce_fp8 does, and writes the result to tensors, unquantized.

    Args:
        outputs: contiguous tensors, each with as many elements as its tensor has in one slice.
    """
    layout = make_layout([output.numel() * slices for output in outputs], slices)
    _check_buffer(buffer, layout)
    with torch.no_grad():
        flat = [output.view(-1) for output in outputs]
        _implementation(buffer.device).reduce(buffer, layout, format, divisor, None, flat)


def check_reduce_op(reduce_op: Any, world_size: int) -> int:
    """Returns the divisor of a sum over `world_size` ranks: 1 for SUM, `world_size` for AVG.

    Raises:
        ValueError: neither SUM nor AVG.
    """
    if reduce_op == ReduceOp.SUM:
        return 1
    if reduce_op == ReduceOp.AVG:
        return world_size
    raise ValueError(
        f"reduce_op={reduce_op_name(reduce_op)}: quantized tensors can be reduced with SUM and AVG only"
    )


def reduce_op_name(reduce_op: Any) -> str:
    """A name for messages, the same on all ranks; str() of a ReduceOp may be an address in memory."""
    names = (name for name, op in ReduceOp.RedOpType.__members__.items() if reduce_op == op)
    return next(names, str(reduce_op))


def _layout(tensors: Sequence[torch.Tensor], slices: int) -> SliceLayout:
    if slices < 1:
        raise ValueError(f"all_reduce_group_size={slices}: at least 1 is needed")
    check_tensors("inputs", tensors)
    return make_layout([tensor.numel() for tensor in tensors], slices)


def _check_buffer(buffer: torch.Tensor, layout: SliceLayout) -> None:
    if buffer.dtype != torch.uint8 or buffer.numel() != layout.nbytes or not buffer.is_contiguous():
        raise ValueError(
            f"the buffer has {buffer.numel()} elements of {buffer.dtype}, these tensors in {layout.slices} "
            f"slices need {layout.nbytes} of torch.uint8"
        )


# Devices of other types use PyTorch's operators.
_OF_TRITON = ("cuda", "xpu")


def _implementation(device: torch.device) -> Any:
    """The module for a device: Triton's kernels if Triton is there and supports it, else PyTorch's."""
    if device.type in _OF_TRITON:
        try:
            from torchft._quantization import kernels
        except ImportError:
            _warn_once(device)
        else:
            return kernels
    return plain


def _warn_once(device: torch.device) -> None:
    warnings.warn(
        f"quantizing on {device} without Triton takes longer and more memory: install triton", stacklevel=4
    )
