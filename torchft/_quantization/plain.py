"""Quantization in plain PyTorch, for any device. The Triton kernels compute the same bits."""

from __future__ import annotations

from typing import Optional, Sequence

import torch
import torch.nn.functional as F

from torchft._quantization.layout import BLOCK, SCALE_BYTES, Format, SliceLayout, TensorPart

# Biased exponent of the smallest scale, 2**-100. Values that are too small for it get the code 0. So no
# product of a code and a scale is a subnormal number: devices treat subnormal numbers differently.
MIN_EXPONENT = 127 - 100


def quantize(inputs: Sequence[torch.Tensor], buffer: torch.Tensor, layout: SliceLayout, fmt: Format) -> None:
    """Writes the codes and scales of flat tensors into a buffer."""
    for part, tensor in zip(layout.parts, inputs):
        for i in range(layout.slices):
            values = tensor[i * part.chunk : (i + 1) * part.chunk].float()
            _store(F.pad(values, (0, part.chunk - values.numel())), _slice(buffer, layout, i), part, fmt)


def dequantize(
    outputs: Sequence[torch.Tensor], buffer: torch.Tensor, layout: SliceLayout, fmt: Format
) -> None:
    """Writes the values of a buffer into flat tensors."""
    for part, tensor in zip(layout.parts, outputs):
        for i in range(layout.slices):
            into = tensor[i * part.chunk : (i + 1) * part.chunk]
            into.copy_(_load(_slice(buffer, layout, i), part, fmt)[: into.numel()])


def reduce(
    buffer: torch.Tensor,
    layout: SliceLayout,
    fmt: Format,
    divisor: int,
    rank: Optional[int],
    outputs: Optional[Sequence[torch.Tensor]],
) -> None:
    """Sums the values of all slices, divides, and writes flat tensors, or codes into slice `rank`."""
    for i, part in enumerate(layout.parts):
        total = _load(_slice(buffer, layout, 0), part, fmt)
        for other in range(1, layout.slices):
            total += _load(_slice(buffer, layout, other), part, fmt)
        if divisor != 1:
            total /= divisor
        if outputs is not None:
            outputs[i].copy_(total)
        elif rank is not None:
            _store(total, _slice(buffer, layout, rank), part, fmt)


def encode(values: torch.Tensor, fmt: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the codes (uint8) of a flat float32 tensor, and the scales (float32) of its blocks."""
    n = values.numel()
    blocks = F.pad(values, (0, -n % BLOCK)).view(-1, BLOCK)
    largest = blocks.abs().amax(dim=1)
    finite = bool(largest.isfinite().all())
    if not finite:
        absolute = blocks.abs()
        largest = torch.where(absolute < torch.inf, absolute, 0.0).amax(dim=1)

    bits = largest.view(torch.int32)
    exponent = (bits >> 23) - fmt.exponent + ((bits & 0x7FFFFF) > fmt.mantissa_bits).int()
    exponent = exponent.clamp(min=MIN_EXPONENT)
    scales = (exponent << 23).view(torch.float32)
    inverse = ((254 - exponent) << 23).view(torch.float32)  # exact, as the scale is a power of two

    scaled = blocks * inverse[:, None]
    if fmt is Format.FP8:
        codes = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        # values that are not finite get their code below, and are no valid integers here
        scaled = scaled if finite else scaled.nan_to_num(0.0, 0.0, 0.0)
        codes = scaled.round_().to(torch.int8).view(torch.uint8)
    if not finite:
        codes = torch.where(blocks.isfinite(), codes, fmt.nan)
    return codes.view(-1)[:n], scales


def decode(codes: torch.Tensor, scales: torch.Tensor, fmt: Format) -> torch.Tensor:
    """The float32 values of flat codes."""
    n = codes.numel()
    padded = F.pad(codes, (0, -n % BLOCK)).view(-1, BLOCK)
    if fmt is Format.FP8:
        values = padded.view(torch.float8_e4m3fn).float()
    else:
        values = padded.view(torch.int8).float()
        values.masked_fill_(padded == fmt.nan, torch.nan)
    return (values * scales[:, None]).view(-1)[:n]


def _slice(buffer: torch.Tensor, layout: SliceLayout, i: int) -> torch.Tensor:
    return buffer[i * layout.slice_bytes : (i + 1) * layout.slice_bytes]


def _store(values: torch.Tensor, slice: torch.Tensor, part: TensorPart, fmt: Format) -> None:
    codes, scales = _places(slice, part)
    new_codes, new_scales = encode(values, fmt)
    codes.copy_(new_codes)
    scales.copy_(new_scales)


def _load(slice: torch.Tensor, part: TensorPart, fmt: Format) -> torch.Tensor:
    codes, scales = _places(slice, part)
    return decode(codes, scales, fmt)


def _places(slice: torch.Tensor, part: TensorPart) -> tuple[torch.Tensor, torch.Tensor]:
    codes = slice[part.codes : part.codes + part.chunk]
    begin = part.scales * SCALE_BYTES
    return codes, slice[begin : begin + part.blocks * SCALE_BYTES].view(torch.float32)
