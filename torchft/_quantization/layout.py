"""The formats of 8-bit codes, and their places in a buffer; for the plain and the Triton code."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from enum import Enum
from typing import Sequence

import torch

#: `fp8` or `int8`: what `should_quantize=True` sends. The same in all groups. Default: fp8.
FORMAT_ENV = "TORCHFT_QUANTIZATION_FORMAT"

# Elements that share a scale.
BLOCK = 2048
SCALE_BYTES = 4
# Slices begin at addresses that are aligned for fast reads on a device.
_ALIGN = 16

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Format(Enum):
    """A format of codes. The scale of a block is the smallest power of two for which its largest code
    does not overflow.

    Attributes:
        exponent: exponent of the largest code, which is ``mantissa * 2**exponent`` with ``1 <= mantissa <
            2``.
        mantissa_bits: the float32 bits of that mantissa. A block whose largest value has a larger mantissa
            needs the next scale.
    """

    FP8 = "fp8"  # float8_e4m3fn: sign, 4 bits of exponent, 3 of mantissa; at most 448 = 1.75 * 2**8
    INT8 = "int8"  # -127 to 127; -128 is NaN; 127 = 1.984375 * 2**6

    @property
    def exponent(self) -> int:
        return 8 if self is Format.FP8 else 6

    @property
    def mantissa_bits(self) -> int:
        return 0x600000 if self is Format.FP8 else 0x7E0000

    @property
    def nan(self) -> int:
        return 0x7F if self is Format.FP8 else 0x80


def format_from_env() -> Format:
    """The format that TORCHFT_QUANTIZATION_FORMAT names; ValueError if there is no such format."""
    text = os.environ.get(FORMAT_ENV, Format.FP8.value)
    try:
        return Format(text)
    except ValueError:
        raise ValueError(f"{FORMAT_ENV}={text!r}: allowed are {', '.join(f.value for f in Format)}") from None


@dataclass(frozen=True)
class TensorPart:
    """The place of one tensor in each slice.

    Attributes:
        chunk: number of elements of the tensor in a slice; the last slices may have fewer, padded with zeros.
        codes: offset of the codes in the slice, in bytes.
        scales: offset of the first scale in the slice, in float32 elements.
    """

    numel: int
    chunk: int
    codes: int
    scales: int

    @property
    def blocks(self) -> int:
        return math.ceil(self.chunk / BLOCK)


@dataclass(frozen=True)
class SliceLayout:
    """A buffer of one slice for each rank: the codes of all tensors, then the scales of all blocks.
    `padding`: the bytes of a slice that belong to no code and no scale, as ranges.
    """

    parts: tuple[TensorPart, ...]
    slices: int
    slice_bytes: int
    padding: tuple[slice, ...]

    @property
    def nbytes(self) -> int:
        return self.slices * self.slice_bytes


def make_layout(numels: Sequence[int], slices: int) -> SliceLayout:
    """The places of tensors with these numbers of elements, each in as many chunks as there are slices."""
    chunks = [math.ceil(numel / slices) for numel in numels]
    codes = _round_up(sum(chunks), SCALE_BYTES)
    parts, code, scale = [], 0, codes // SCALE_BYTES
    for numel, chunk in zip(numels, chunks):
        part = TensorPart(numel, chunk, code, scale)
        parts.append(part)
        code += chunk
        scale += part.blocks
    end = scale * SCALE_BYTES
    size = _round_up(end, _ALIGN)
    padding = tuple(slice(*gap) for gap in ((code, codes), (end, size)) if gap[0] < gap[1])
    return SliceLayout(tuple(parts), slices, size, padding)


def _round_up(n: int, to: int) -> int:
    return math.ceil(n / to) * to


def check_tensors(name: str, tensors: Sequence[torch.Tensor]) -> None:
    """Refuses tensors that cannot be quantized, by a ValueError that names the first of them."""
    for i, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{name}[{i}]={tensor!r}: allowed are tensors")
        what = f"{name if len(tensors) == 1 else f'{name}[{i}]'} of shape {tuple(tensor.shape)}"
        if tensor.dtype not in DTYPES:
            allowed = ", ".join(str(d) for d in DTYPES)
            raise ValueError(f"{what} is {tensor.dtype}, which cannot be quantized: allowed are {allowed}")
        if tensor.layout != torch.strided or hasattr(tensor, "to_local"):
            raise ValueError(
                f"{what} is {type(tensor).__name__}, {tensor.layout}: only dense local tensors are allowed"
            )
        if tensor.device != tensors[0].device:
            raise ValueError(
                f"{what} is on {tensor.device}, {name}[0] on {tensors[0].device}: one device is allowed"
            )
