"""How much memory this process may still take."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Optional


def available_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> Optional[int]:
    """Bytes that can be allocated before the host or this container runs out; None if nobody says.

    Args:
        proc: where the host's figures are
        cgroup: where the container's limit is (version 2, else version 1)
    """
    limits = [_host_available(proc), _cgroup_available(cgroup, "memory.max", "memory.current")]
    limits.append(_cgroup_available(cgroup / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"))
    known = [limit for limit in limits if limit is not None]
    return min(known) if known else None


def _host_available(proc: Path) -> Optional[int]:
    try:
        for line in (proc / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


def _cgroup_available(folder: Path, limit_file: str, usage_file: str) -> Optional[int]:
    try:
        limit = (folder / limit_file).read_text().strip()
        if limit == "max":
            return None
        usage = int((folder / usage_file).read_text())
        for line in (folder / "memory.stat").read_text().splitlines():
            if line.startswith(("inactive_file ", "total_inactive_file ")):
                usage -= int(line.split()[1])  # page cache that goes when it is needed
                break
        return max(0, int(limit) - usage)
    except (OSError, ValueError, IndexError):
        return None
