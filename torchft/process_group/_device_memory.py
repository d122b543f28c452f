"""The device memory of NCCL's communicators: whether another one fits beside one that is being aborted."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Optional

import torch

# Upper bounds, from NCCL's source, of its buffers for one peer and channel: one for each protocol.
# NCCL_BUFFSIZE replaces the size of the first one (Simple); the others are LL128 and LL.
_SIMPLE_BYTES, _LL128_BYTES, _LL_BYTES = 4 << 20, 120 * 640 * 8 * 8, 512 * 8 * 8 * 16
_CHANNELS = 32
# In a channel a rank receives from the previous rank of the ring, and from four neighbors in the tree.
_MOST_PEERS = 5


def communicator_bytes(world_size: int, environment: Mapping[str, str] = os.environ) -> int:
    """Estimates the bytes of device memory for a communicator's buffers: rather too much than too little."""

    def number(names: tuple[str, ...], default: int) -> int:
        return next((int(environment[n]) for n in names if environment.get(n, "").isdecimal()), default)

    simple = number(("NCCL_BUFFSIZE",), _SIMPLE_BYTES)
    channels = number(("NCCL_MAX_CTAS", "NCCL_MAX_NCHANNELS"), _CHANNELS)
    return min(world_size - 1, _MOST_PEERS) * channels * (simple + _LL128_BYTES + _LL_BYTES)


def waits_for_abort(free: Optional[int], needed: int) -> bool:
    """Whether a communicator is made only after the memory of the former one is freed; in bytes."""
    return free is not None and free < needed


def free_bytes(device: torch.device) -> Optional[int]:
    """The free memory of a device; None if it does not say."""
    with suppress(Exception):
        return int(torch.get_device_module(device).mem_get_info(device)[0])
    return None
