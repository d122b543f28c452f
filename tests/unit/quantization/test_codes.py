"""Codes equal those of slow references written from the definitions of the formats, and keep the documented
bounds.
"""

from __future__ import annotations

import math

import pytest
import torch

from tests.unit.quantization.inputs import flat_inputs
from torchft._quantization.layout import BLOCK, Format
from torchft._quantization.plain import decode, encode

INPUTS = flat_inputs()


def e4m3(code: int) -> float:
    """The value of a code by the definition of e4m3 (Micikevicius et al. 2022, "FP8 Formats for Deep
    Learning").
    """
    sign, exponent, mantissa = code >> 7, (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    value = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -value if sign else value


def values_of(fmt: Format) -> dict[int, float]:
    if fmt is Format.FP8:
        return {code: e4m3(code) for code in range(256)}
    return {code: math.nan if code == 128 else float(code - 256 * (code > 127)) for code in range(256)}


def reference_code(value: float, scale: float, fmt: Format) -> int:
    """The nearest code. A tie goes to the even code."""
    if not math.isfinite(value):
        return fmt.nan
    scaled = value / scale  # exact in float64
    negative = math.copysign(1, value) < 0
    candidates = [
        (abs(of - scaled), code & 1, code)
        for code, of in values_of(fmt).items()
        if not math.isnan(of) and (fmt is Format.INT8 or (code > 127) == negative)
    ]
    return min(candidates)[2]


def reference_scale(block: list[float], fmt: Format) -> float:
    """The smallest power of two with which the largest code fits, no smaller than 2**-100."""
    largest = max([abs(v) for v in block if math.isfinite(v)], default=0.0)
    limit = 448 if fmt is Format.FP8 else 127
    exponent = -100
    while largest / 2.0**exponent > limit:
        exponent += 1
    return 2.0**exponent


@pytest.mark.parametrize("fmt", Format)
def test_every_code_is_decoded(fmt: Format) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    got = decode(codes, torch.tensor([4.0]), fmt).tolist()
    for code, value in values_of(fmt).items():
        assert got[code] == 4 * value or (math.isnan(value) and math.isnan(got[code])), code


@pytest.mark.parametrize("fmt", Format)
@pytest.mark.parametrize("name", INPUTS)
def test_codes_and_scales_are_those_of_the_definition(fmt: Format, name: str) -> None:
    values = INPUTS[name]
    codes, scales = encode(values, fmt)
    numbers = values.tolist()
    for i in range(0, len(numbers), BLOCK):
        scale = reference_scale(numbers[i : i + BLOCK], fmt)
        assert scales[i // BLOCK].item() == scale
        for j in range(i, min(i + BLOCK, len(numbers)), 7 if len(numbers) > 1000 else 1):
            assert codes[j].item() == reference_code(numbers[j], scale, fmt), (j, numbers[j])


@pytest.mark.parametrize("fmt", Format)
@pytest.mark.parametrize("name", INPUTS)
def test_error_is_within_the_stated_bound(fmt: Format, name: str) -> None:
    values = INPUTS[name]
    got = decode(*encode(values, fmt), fmt)
    finite = values.isfinite()
    assert got[~finite].isnan().all()
    small = finite & (values.abs() < 2.0**127)  # larger ones may overflow, as documented
    assert got[small].isfinite().all()
    for i in range(0, values.numel(), BLOCK):
        block, inside = values[i : i + BLOCK].double(), small[i : i + BLOCK]
        largest = block[finite[i : i + BLOCK]].abs().max().item() if finite[i : i + BLOCK].any() else 0.0
        error = (got[i : i + BLOCK].double() - block).abs()[inside]
        if fmt is Format.FP8:
            bound = (block.abs()[inside] / 16).clamp(min=max(largest / 2**17, 2.0**-110))
        else:
            bound = torch.tensor(max(largest / 127, 2.0**-101))
        assert (error <= bound).all()


@pytest.mark.parametrize("fmt", Format)
def test_decoded_values_are_coded_without_error(fmt: Format) -> None:
    once = decode(*encode(INPUTS["wide"], fmt), fmt)
    assert torch.equal(decode(*encode(once, fmt), fmt), once)
