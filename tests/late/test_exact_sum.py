"""Exact sums of gradients that are on several devices."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from torchft.data.exact_sum import ExactSum

DEVICES = ("cpu", "late:0", "late:1")


def attempt(parameters: list[torch.nn.Parameter], total: ExactSum, units: list[list[float]]) -> bool:
    total.begin()
    for values in units:
        for parameter, value in zip(parameters, values):
            parameter.grad = torch.full_like(parameter, value, requires_grad=False)
        total.add()
    return total.read()


def test_a_sum_that_does_not_fit_on_one_device_repeats_the_step_on_all(late: ModuleType) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(3, device=device)) for device in DEVICES]
    total = ExactSum(((device, parameter) for device, parameter in zip(DEVICES, parameters)), max_units=4)
    assert [str(buffer.device) for buffer in total.buffers] == list(DEVICES)
    assert not attempt(parameters, total, [[1.0, 2.0, 3.0]])
    assert attempt(parameters, total, [[1.0, 2.0, 3.0]])
    total.commit()
    units = [[1.0, 2.0, 3.0], [4.0, 2.0**60, 5.0]]
    assert not attempt(parameters, total, units)
    assert attempt(parameters, total, units)
    for parameter, value in zip(parameters, [5.0, 2.0**60, 8.0]):
        assert parameter.grad is not None and parameter.grad.device == parameter.device
        assert parameter.grad.tolist() == [value] * 3


def test_a_unit_is_added_while_the_device_is_held(late: ModuleType) -> None:
    parameter = torch.nn.Parameter(torch.zeros(1000, device="late"))
    total = ExactSum([("a", parameter)], max_units=4)
    attempt([parameter], total, [[3.0]])
    total.begin()
    with late.held():
        for value in (1.0, 2.0):
            parameter.grad = torch.full_like(parameter, value, requires_grad=False)
            total.add()
        assert late.pending() > 0
    assert total.read()
    assert parameter.grad is not None and parameter.grad.tolist() == [3.0] * 1000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_the_bits_are_those_of_the_cpu(late: ModuleType, dtype: torch.dtype) -> None:
    gradients = [
        torch.randn(500, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in range(3)
    ]
    found = []
    for device in ("cpu", "late"):
        parameter = torch.nn.Parameter(torch.zeros(500, dtype=dtype, device=device))
        total = ExactSum([("a", parameter)], max_units=4)
        for complete in (False, True):
            total.begin()
            for gradient in gradients:
                parameter.grad = gradient.to(device)
                total.add()
            assert total.read() == complete
        assert parameter.grad is not None
        found.append(parameter.grad.cpu())
    assert torch.equal(*found)
