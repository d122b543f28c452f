"""Compares Triton's kernels with plain PyTorch, bit for bit: on a device, or on a CPU in Triton's
interpreter.
"""

from __future__ import annotations

from typing import Sequence

import torch

from tests.unit.quantization.inputs import flat_inputs
from torchft._quantization import plain
from torchft._quantization.layout import Format, make_layout


def compare(tensors: Sequence[torch.Tensor], slices: int, fmt: Format) -> int:
    """Quantizes, sums and dequantizes in both ways. Returns the number of buffers and tensors compared."""
    from torchft._quantization import kernels

    device = tensors[0].device
    layout = make_layout([tensor.numel() for tensor in tensors], slices)
    ours, theirs = (torch.zeros(layout.nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    plain.quantize(tensors, ours, layout, fmt)
    kernels.quantize(tensors, theirs, layout, fmt)
    assert torch.equal(ours, theirs), (fmt, slices)
    a, b = ([torch.empty_like(tensor) for tensor in tensors] for _ in range(2))
    plain.dequantize(a, ours, layout, fmt)
    kernels.dequantize(b, ours, layout, fmt)
    compared = 1 + check_same(a, b)
    # Triton's interpreter truncates float32 to bfloat16, where devices round.
    dtype = torch.float16 if device.type == "cpu" else torch.bfloat16
    a, b = ([torch.empty(part.chunk, dtype=dtype, device=device) for part in layout.parts] for _ in range(2))
    plain.reduce(ours, layout, fmt, 3, None, a)
    kernels.reduce(ours, layout, fmt, 3, None, b)
    compared += check_same(a, b)
    for divisor in (1, 3):
        plain.reduce(ours, layout, fmt, divisor, slices - 1, None)
        kernels.reduce(theirs, layout, fmt, divisor, slices - 1, None)
        assert torch.equal(ours, theirs), (fmt, slices, divisor)
        compared += 1
    return compared


def check_same(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> int:
    for x, y in zip(a, b):
        assert torch.equal(x.isnan(), y.isnan()) and torch.equal(x.nan_to_num(), y.nan_to_num())
    return len(a)


def compare_all(device: torch.device) -> int:
    """Compares for all inputs, dtypes and formats."""
    inputs = [values.to(device) for values in flat_inputs().values()]
    compared = 0
    for fmt in Format:
        for slices, dtype in ((2, torch.bfloat16), (3, torch.float32), (1, torch.float16))[
            : 2 if device.type == "cpu" else 3
        ]:
            compared += compare([values.to(dtype) for values in inputs], slices, fmt)
    return compared


def main() -> None:
    print(compare_all(torch.device("cpu")))
