"""PyTorch's settings of NCCL by which a process survives the failure of a peer. Imports no PyTorch."""

from __future__ import annotations

import os

# PyTorch's older NCCL backend: once any group of a process has seen an error, the monitor of the process's
# first group, mostly the user's world, writes the flight recorder, waits for TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC
# (480 s), and ends the process. With 0 it does neither. The value counts that the environment has when the
# first group is made.
DUMP_ENV = "TORCH_NCCL_DUMP_ON_TIMEOUT"


def dump_setting() -> str:
    """The user's value of `DUMP_ENV`; otherwise "0"."""
    return os.environ.get(DUMP_ENV) or "0"


def ends_survivors() -> bool:
    """Whether the user has set that the monitor ends the process."""
    return dump_setting().lower() in ("1", "y", "yes", "t", "true")  # as PyTorch reads it
