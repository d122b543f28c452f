"""csrc/isolated.c"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

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


def test_copy_tries_both_ways(tmp_path: Path) -> None:
    """The first large copies of a process try two ways; each is exact."""
    fresh = shutil.copy(_native.__file__, tmp_path)  # counts from the beginning
    spec = importlib.util.spec_from_file_location(_native.__name__, fresh)
    assert spec is not None and spec.loader is not None
    native = importlib.util.module_from_spec(spec)
    for trial in range(10):
        memory = torch.randint(0, 255, ((1 << 21) + 64 * trial + 17,), dtype=torch.uint8)
        to = torch.zeros_like(memory)
        native.copy(to.data_ptr(), memory.data_ptr(), memory.nbytes)
        assert torch.equal(to, memory)
