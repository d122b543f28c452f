"""The memory of this process."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest

# For tests that call `resident`.
needs_proc = pytest.mark.skipif(
    sys.platform != "linux", reason="the memory of a process is read from Linux's /proc"
)


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
