"""Quantization kernels in Triton, one program per block. `plain` computes the same bits without Triton.

Codes are encoded and decoded in integer arithmetic, so devices without fp8 conversions produce the same bits.
Scales are powers of two, so multiplying by them is exact. Only sums are rounded: they are computed in the
order of the ranks, and `enable_fp_fusion=False` keeps the compiler from fusing them with multiplications.
"""

from __future__ import annotations

from typing import Any, Optional, Sequence

import torch
import triton
import triton.language as tl

from torchft._quantization.layout import BLOCK, Format, SliceLayout
from torchft._quantization.plain import MIN_EXPONENT

_OPTIONS: dict[str, Any] = {"enable_fp_fusion": False, "num_warps": 8}


def quantize(inputs: Sequence[torch.Tensor], buffer: torch.Tensor, layout: SliceLayout, fmt: Format) -> None:
    """As `plain.quantize`."""
    for part, tensor in zip(layout.parts, inputs):
        if part.chunk:
            _quantize[(part.blocks, layout.slices)](
                tensor, buffer, buffer.view(torch.float32), part.numel, part.chunk, part.codes, part.scales,
                layout.slice_bytes, **_writing(fmt), **_OPTIONS,
            )  # fmt: skip


def dequantize(
    outputs: Sequence[torch.Tensor], buffer: torch.Tensor, layout: SliceLayout, fmt: Format
) -> None:
    """As `plain.dequantize`."""
    for part, tensor in zip(layout.parts, outputs):
        if part.chunk:
            _dequantize[(part.blocks, layout.slices)](
                tensor, buffer, buffer.view(torch.float32), part.numel, part.chunk, part.codes, part.scales,
                layout.slice_bytes, **_reading(fmt), **_OPTIONS,
            )  # fmt: skip


def reduce(
    buffer: torch.Tensor,
    layout: SliceLayout,
    fmt: Format,
    divisor: int,
    rank: Optional[int],
    outputs: Optional[Sequence[torch.Tensor]],
) -> None:
    """As `plain.reduce`."""
    for i, part in enumerate(layout.parts):
        if part.chunk:
            output = outputs[i] if outputs is not None else buffer.view(torch.float32)
            _reduce[(part.blocks,)](
                output, buffer, buffer.view(torch.float32), part.chunk, part.codes, part.scales,
                layout.slice_bytes, layout.slices, float(divisor), rank or 0,
                **_writing(fmt, TO_CODES=outputs is None), **_OPTIONS,
            )  # fmt: skip


def _reading(fmt: Format, **more: Any) -> dict[str, Any]:
    return {"FP8": fmt is Format.FP8, "BLOCK": BLOCK, **more}


def _writing(fmt: Format, **more: Any) -> dict[str, Any]:
    limits = {"EXPONENT": fmt.exponent, "MANTISSA": fmt.mantissa_bits, "MIN_EXPONENT": MIN_EXPONENT}
    return _reading(fmt, **limits, **more)


@triton.jit
def _quantize(
    values_ptr, codes_ptr, scales_ptr, numel, chunk, codes_at, scales_at, slice_bytes,
    FP8: tl.constexpr, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, MIN_EXPONENT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    slice = tl.program_id(1).to(tl.int64)
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < chunk
    element = slice * chunk + offsets
    values = tl.load(values_ptr + element, mask=inside & (element < numel), other=0.0).to(tl.float32)
    _store_block(
        values, codes_ptr, scales_ptr, slice, block, offsets, inside, codes_at, scales_at, slice_bytes,
        FP8, EXPONENT, MANTISSA, MIN_EXPONENT,
    )  # fmt: skip


@triton.jit
def _dequantize(
    values_ptr, codes_ptr, scales_ptr, numel, chunk, codes_at, scales_at, slice_bytes,
    FP8: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    slice = tl.program_id(1).to(tl.int64)
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < chunk
    values = _load_block(
        codes_ptr, scales_ptr, slice, block, offsets, inside, codes_at, scales_at, slice_bytes, FP8
    )  # fmt: skip
    element = slice * chunk + offsets
    tl.store(values_ptr + element, values.to(values_ptr.dtype.element_ty), mask=inside & (element < numel))


@triton.jit
def _reduce(
    output_ptr, codes_ptr, scales_ptr, chunk, codes_at, scales_at, slice_bytes, slices, divisor, rank,
    TO_CODES: tl.constexpr,
    FP8: tl.constexpr, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, MIN_EXPONENT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < chunk
    first = tl.zeros((), tl.int64)
    total = _load_block(
        codes_ptr, scales_ptr, first, block, offsets, inside, codes_at, scales_at, slice_bytes, FP8
    )  # fmt: skip
    for i in range(1, slices):
        total += _load_block(
            codes_ptr, scales_ptr, first + i, block, offsets, inside, codes_at, scales_at, slice_bytes, FP8
        )  # fmt: skip
    total = tl.div_rn(total, tl.zeros_like(total) + divisor)
    if TO_CODES:
        _store_block(
            total, codes_ptr, scales_ptr, first + rank, block, offsets, inside, codes_at, scales_at,
            slice_bytes, FP8, EXPONENT, MANTISSA, MIN_EXPONENT,
        )  # fmt: skip
    else:
        tl.store(output_ptr + offsets, total.to(output_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _store_block(
    values, codes_ptr, scales_ptr, slice, block, offsets, inside, codes_at, scales_at, slice_bytes,
    FP8: tl.constexpr, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, MIN_EXPONENT: tl.constexpr,
):  # fmt: skip
    absolute = tl.abs(values)
    finite = absolute < float("inf")
    largest = tl.max(tl.where(finite, absolute, 0.0), axis=0)
    bits = largest.to(tl.int32, bitcast=True)  # pyrefly: ignore [missing-attribute]
    exponent = (bits >> 23) - EXPONENT + ((bits & 0x7FFFFF) > MANTISSA).to(tl.int32)
    exponent = tl.maximum(exponent, MIN_EXPONENT)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    if FP8:
        scaled = tl.where(finite, absolute, 0.0) * inverse
        codes = tl.where(finite, _fp8_code(scaled) | ((values.to(tl.int32, bitcast=True) >> 24) & 0x80), 0x7F)
    else:
        # Adding 1.5 * 2**23 leaves the integer, rounded to even, in the lowest bits.
        shifted = tl.where(finite, values, 0.0) * inverse + 12582912.0
        codes = tl.where(finite, shifted.to(tl.int32, bitcast=True) & 0xFF, 0x80)
    tl.store(codes_ptr + slice * slice_bytes + codes_at + offsets, codes.to(tl.uint8), mask=inside)
    tl.store(scales_ptr + slice * (slice_bytes // 4) + scales_at + block, scale)


@triton.jit
def _load_block(
    codes_ptr, scales_ptr, slice, block, offsets, inside, codes_at, scales_at, slice_bytes, FP8: tl.constexpr
):  # fmt: skip
    codes = tl.load(codes_ptr + slice * slice_bytes + codes_at + offsets, mask=inside, other=0).to(tl.int32)
    scale = tl.load(scales_ptr + slice * (slice_bytes // 4) + scales_at + block)
    if FP8:
        values = _fp8_value(codes)
    else:
        values = tl.where(codes == 0x80, float("nan"), (codes - ((codes & 0x80) << 1)).to(tl.float32))
    return values * scale


@triton.jit
def _fp8_code(values):
    """The bits of e4m3 for 0 <= values <= 448, rounded to even."""
    bits = values.to(tl.int32, bitcast=True)
    # Keep 3 of the mantissa's 23 bits, and change the bias of the exponent from 127 to 7.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Codes below 2**-6 are multiples of 2**-9, as floats near 2**14: adding 2**14 rounds to one.
    subnormal = (values + 16384.0).to(tl.int32, bitcast=True) & 0xF
    return tl.where(values < 0.015625, subnormal, normal)


@triton.jit
def _fp8_value(codes):
    magnitude = codes & 0x7F
    normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    subnormal = magnitude.to(tl.float32) * 0.001953125
    values = tl.where(magnitude < 8, subnormal, normal)
    values = tl.where(magnitude == 0x7F, float("nan"), values)
    # Not -values, which Triton compiles to 0 - values: that turns -0.0 into 0.0.
    return (values.to(tl.int32, bitcast=True) | ((codes & 0x80) << 24)).to(tl.float32, bitcast=True)
