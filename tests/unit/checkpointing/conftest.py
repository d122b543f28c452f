from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.checkpointing.simulated_device import BLOCK, Simulated
from torchft.checkpointing import _staging


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Simulated]]:
    Simulated.made = []
    monkeypatch.setattr(Simulated, "late", 0.002)
    monkeypatch.setitem(_staging.KINDS, "cpu", Simulated)
    monkeypatch.setattr(_staging, "_free", {})
    monkeypatch.setattr(_staging, "BLOCK", BLOCK)
    yield Simulated
    for each in Simulated.made:
        each.close()
