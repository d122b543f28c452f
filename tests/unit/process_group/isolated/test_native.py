"""csrc/isolated.c"""

from __future__ import annotations

import pytest
import torch

from torchft.process_group.isolated import _native


@pytest.mark.parametrize("size", [0, 1, 1000, 1 << 20, 1 << 21, (1 << 21) + 63, (1 << 22) + 17])
def test_copy(size: int) -> None:
    """Copies are exact for any start address, also large ones, which are made in whole cache lines."""
    memory = torch.randint(0, 255, (size + 32,), dtype=torch.uint8)
    for at, begin in [(0, 0), (1, 0), (0, 15), (17, 3)]:
        to = torch.full((size + 32,), 255, dtype=torch.uint8)
        _native.copy(to.data_ptr() + at, memory.data_ptr() + begin, size)
        assert torch.equal(to[at : at + size], memory[begin : begin + size])
        assert to[:at].eq(255).all() and to[at + size :].eq(255).all()
