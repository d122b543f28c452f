from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.distributed import ReduceOp

from tests.unit.quantization.inputs import flat_inputs
from torchft import quantization
from torchft.quantization import (
    BLOCK_SIZE_T,
    FORMAT_ENV,
    SCALE_DTYPE,
    SCALE_DTYPE_BYTES,
    Format,
    fused_dequantize_from_fp8,
    fused_quantize_into_fp8,
    fused_reduce_fp8,
)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def several() -> list[torch.Tensor]:
    """Tensors of all dtypes, shapes and layouts."""
    random = torch.Generator().manual_seed(1)
    return [
        torch.randn(33, 65, generator=random),
        torch.randn(7, generator=random).bfloat16(),
        torch.empty(0, 4),
        torch.tensor(2.5),
        torch.randn(50, 3, generator=random).half().t(),  # not contiguous
        torch.randn(3, 1, 9, generator=random, requires_grad=True),
    ]


def roundtrip(tensors: list[torch.Tensor], slices: int) -> list[torch.Tensor]:
    buffer = fused_quantize_into_fp8(tensors, slices)
    outputs = [torch.full_like(tensor, 77) for tensor in tensors]
    fused_dequantize_from_fp8(outputs, buffer, slices)
    return outputs


@pytest.mark.parametrize("slices", [1, 2, 3, 7])
def test_several_tensors_come_back(slices: int) -> None:
    tensors = several()
    for tensor, got in zip(tensors, roundtrip(tensors, slices)):
        assert got.dtype == tensor.dtype and got.shape == tensor.shape
        torch.testing.assert_close(got, tensor.detach(), rtol=2**-4 + 2**-7, atol=1e-5)


@pytest.mark.parametrize("slices", [1, 2, 3, 7])
@pytest.mark.parametrize("numel", [1, 6, 4099])
def test_only_the_padding_is_zeroed(numel: int, slices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is used as it comes, and each byte that is sent is defined."""
    tensors = [torch.arange(1.0, numel + 1), torch.ones(5)]
    buffers = []
    for byte in (0, 255):
        with monkeypatch.context() as m:
            m.setattr(torch, "zeros", None)
            empty = lambda *size, **kinds: torch.full(size, byte, **kinds)  # noqa: E731, B023
            m.setattr(torch, "empty", empty)
            buffers.append(fused_quantize_into_fp8(tensors, slices))
    assert torch.equal(*buffers)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", flat_inputs())
def test_values_that_are_not_finite_stay_so_and_others_stay_finite(name: str, dtype: torch.dtype) -> None:
    values = flat_inputs()[name].to(dtype)
    (got,) = roundtrip([values], 3)
    small = values.isfinite() & (values.float().abs() < torch.finfo(dtype).max / 2)
    assert torch.equal(got.isnan()[~values.isfinite()], torch.ones_like(got.isnan()[~values.isfinite()]))
    assert got[small].isfinite().all()


def test_the_input_is_unchanged() -> None:
    tensors = several()
    before = [tensor.detach().clone() for tensor in tensors]
    fused_quantize_into_fp8(tensors, 3)
    assert all(torch.equal(a.detach(), b) for a, b in zip(tensors, before))


def test_a_quarter_of_the_bytes() -> None:
    tensor = torch.zeros(1_000_003)
    buffer = fused_quantize_into_fp8([tensor], 4)
    assert buffer.dtype == torch.uint8
    assert 1_000_003 <= buffer.numel() <= 1.003 * tensor.nbytes / 4


@pytest.mark.parametrize("fmt", Format)
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG])
def test_reduction_adds_up_the_slices(op: Any, fmt: Format) -> None:
    """The buffer is like that of a rank after the exchange: slice i holds rank i's values of this rank's
    third of the tensors.
    """
    tensors = [torch.randn(30, 7), torch.randn(9)]
    buffer = fused_quantize_into_fp8(tensors, 3, fmt)
    coded = [torch.empty_like(tensor) for tensor in tensors]
    fused_dequantize_from_fp8(coded, buffer, 3, fmt)
    fused_reduce_fp8(tensors, buffer, 3, 1, op, fmt)
    fused_dequantize_from_fp8(tensors, buffer, 3, fmt)
    for tensor, values in zip(tensors, coded):
        parts = values.view(3, -1)
        want = parts[0] + parts[1] + parts[2]
        if op == ReduceOp.AVG:
            want /= 3
        got = tensor.view(3, -1)
        assert torch.equal(got[0], parts[0]) and torch.equal(got[2], parts[2])  # only the requested slice
        bound = want.abs().max() / 127 if fmt is Format.INT8 else want.abs() / 16 + want.abs().max() / 2**17
        assert ((got[1] - want).abs() <= bound).all()


def test_infinite_sum_is_nan() -> None:
    tensor = torch.tensor([3.0e38, 1.0, 3.0e38, 1.0])
    buffer = fused_quantize_into_fp8([tensor], 2)
    fused_reduce_fp8([tensor], buffer, 2, 0)
    fused_dequantize_from_fp8([tensor], buffer, 2)
    assert tensor[0].isnan() and tensor[1].isfinite()


def test_format_is_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(100)
    assert torch.equal(fused_quantize_into_fp8([tensor], 1), fused_quantize_into_fp8([tensor], 1, Format.FP8))
    monkeypatch.setenv(FORMAT_ENV, "int8")
    assert torch.equal(
        fused_quantize_into_fp8([tensor], 1), fused_quantize_into_fp8([tensor], 1, Format.INT8)
    )


# Bad input


def test_unknown_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FORMAT_ENV, "fp4")
    with pytest.raises(ValueError, match="TORCHFT_QUANTIZATION_FORMAT='fp4': allowed are fp8, int8"):
        fused_quantize_into_fp8([torch.zeros(1)], 1)


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.float64, torch.bool, torch.complex64, torch.float8_e4m3fn]
)
def test_dtype_that_cannot_be_quantized(dtype: torch.dtype) -> None:
    with pytest.raises(
        ValueError, match=rf"inputs\[1\] of shape \(3, 2\) is {dtype}.*allowed are torch.float32"
    ):
        fused_quantize_into_fp8([torch.zeros(1), torch.zeros(3, 2).to(dtype)], 1)


def test_sparse_tensor() -> None:
    with pytest.raises(ValueError, match=r"inputs of shape .*sparse.*only dense"):
        fused_quantize_into_fp8([torch.eye(3).to_sparse()], 1)


def test_buffer_of_other_tensors() -> None:
    buffer = fused_quantize_into_fp8([torch.zeros(100)], 2)
    for call in (
        lambda: fused_dequantize_from_fp8([torch.zeros(200)], buffer, 2),
        lambda: fused_dequantize_from_fp8([torch.zeros(100)], buffer.view(torch.int8), 2),
        lambda: fused_reduce_fp8([torch.zeros(200)], buffer, 2, 0),
    ):
        with pytest.raises(ValueError, match=r"the buffer has \d+ elements"):
            call()


def test_arguments_out_of_range() -> None:
    tensor = torch.zeros(4)
    buffer = fused_quantize_into_fp8([tensor], 2)
    with pytest.raises(ValueError, match="all_reduce_group_size=0"):
        fused_quantize_into_fp8([tensor], 0)
    with pytest.raises(ValueError, match="all_reduce_rank=2: allowed are 0 to 1"):
        fused_reduce_fp8([tensor], buffer, 2, 2)
    with pytest.raises(ValueError, match=r"reduce_op=MAX: .*SUM and AVG"):
        fused_reduce_fp8([tensor], buffer, 2, 0, ReduceOp.MAX)


# Triton


def test_imports_without_triton() -> None:
    """Triton is imported only when one of its names is requested."""
    script = (
        "import sys; sys.modules['triton'] = None\n"
        "import torchft.quantization as q, torchft.collectives, torch\n"
        "q.fused_quantize_into_fp8([torch.ones(3)], 1)\n"
        "try: q.SCALE_TL_DTYPE\n"
        "except ImportError: print('missing')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert done.stdout == "missing\n", done.stderr


def test_names_and_values() -> None:
    assert BLOCK_SIZE_T == 2048
    assert SCALE_DTYPE is torch.float32
    assert SCALE_DTYPE_BYTES == 4


def test_names_of_triton() -> None:
    tl = pytest.importorskip("triton.language", reason="needs Triton")
    assert quantization.SCALE_TL_DTYPE is tl.float32
    assert quantization.SCALE_TL_DTYPE_BYTES.value == 4


@pytest.mark.slow  # ten seconds of Triton's interpreter; test_codes.py has the formulas in plain PyTorch
def test_kernels_give_the_same_bits() -> None:
    """On a CPU this uses Triton's interpreter, in a separate process: it must be chosen before Triton is
    imported.
    """
    pytest.importorskip("triton", reason="needs Triton")
    script = "from tests.unit.quantization.interpreted import main; main()"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        capture_output=True, text=True, timeout=110, env={**os.environ, "TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) > 100  # comparisons


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kernels_compile_for_devices_with_and_without_fp8() -> None:
    """The compiler that comes with Triton makes the machine code: no device is needed."""
    pytest.importorskip("triton", reason="needs Triton")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.unit.quantization.compiled"],
        capture_output=True, text=True, timeout=550,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 48
