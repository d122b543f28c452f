"""Replica groups over torchcomms, which must be installed; see `torchft.process_group.torchcomms`."""

from __future__ import annotations

from torchft.process_group.torchcomms import _REDUCE_OP_MAP, ProcessGroupTorchComms

__all__ = ["_REDUCE_OP_MAP", "ProcessGroupTorchComms"]
