"""DiLoCo of a model on a device: the results equal those on a CPU, the backup is in pinned memory, and a
synchronization allocates no memory.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.local_sgd.one_group import OneGroup
from torchft.local_sgd import DiLoCo

WIDTH, LAYERS = 1024, 4
LAYER = WIDTH * WIDTH * 4  # bytes


def run(device: str, steps: int = 24, **settings: Any) -> tuple[nn.Sequential, OneGroup, int]:
    """Returns the model, its Manager, and the peak memory in bytes of the last round, above that between two
    rounds.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]).to(device)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True, foreach=False)
    manager = OneGroup(peers=lambda t: t.mul_(0.5))
    base = most = 0
    with DiLoCo(manager, list(model), inner, outer, sync_every=8, **settings):  # type: ignore[arg-type]
        for step in range(steps):
            for p in model.parameters():
                p.grad = torch.full_like(p, 0.01 * (step + 1))
            if device == "cuda" and step == steps - 8:
                torch.cuda.synchronize()
                base = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
            inner.step()
    if device == "cuda":
        most = torch.cuda.max_memory_allocated() - base
    return model, manager, most


@pytest.mark.parametrize(
    ("settings", "layers"),
    [
        ({}, 0),
        ({"use_bucketization": True}, 0),
        ({"fragment_sync_delay": 1, "fragment_update_alpha": 0.5}, 2),
    ],
)
def test_numbers_and_memory(settings: dict[str, Any], layers: int) -> None:
    on_device, manager, most = run("cuda", **settings)
    on_cpu, _, _ = run("cpu", **settings)
    for a, b in zip(on_device.parameters(), on_cpu.parameters()):
        torch.testing.assert_close(a.cpu(), b)
    # The outer step allocates temporary memory for one layer and a few scalars
    assert most <= (layers + 1) * LAYER + (1 << 20)
    (_, read) = manager.state_fns["StreamingDiLoCoFragment_0"]
    backup = read()["original_parameters"]["weight"]
    assert backup.device.type == "cpu" and backup.is_pinned()


def test_the_backup_is_on_the_requested_device() -> None:
    _, manager, _ = run("cuda", steps=8, backup_device=torch.device("cuda"))
    (_, read) = manager.state_fns["StreamingDiLoCoFragment_0"]
    assert read()["original_parameters"]["weight"].device.type == "cuda"
    _, manager, _ = run("cuda", steps=8, pin_memory=False)
    (_, read) = manager.state_fns["StreamingDiLoCoFragment_0"]
    assert not read()["original_parameters"]["weight"].is_pinned()
