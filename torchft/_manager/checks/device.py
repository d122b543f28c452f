"""The device of a rank: no other rank of its group may use it."""

from __future__ import annotations

import os

import torch
from torch.distributed import Store

from torchft.utils import current_device, device_name, device_uuid

# With 1, NCCL lets several ranks share a device.
_SHARED_ENV = "NCCL_MULTI_RANK_GPU_ENABLE"


def claim_device(store: Store, replica_id: str, group_rank: int) -> None:
    """Registers the current device of a rank in the store of its group. Device 0 of two ranks may be two
    devices, by CUDA_VISIBLE_DEVICES, and two numbers may be one: devices are compared by their UUIDs.

    Args:
        replica_id: replica id of the group, with its incarnation

    Raises:
        ValueError: another rank of the group uses the device, for example because the host has fewer devices
            than ranks
    """
    index = current_device()
    if index is None or os.environ.get(_SHARED_ENV) == "1":
        return
    uuid = device_uuid(index)
    if uuid is None:
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    mine = (
        f"rank {group_rank} (LOCAL_RANK={os.environ.get('LOCAL_RANK')}, CUDA_VISIBLE_DEVICES={visible}, "
        f"{torch.accelerator.device_count()} visible) on {device_name()}"
    )
    first = store.compare_set(f"torchft/{replica_id}/device/{uuid}", "", mine).decode()
    if first != mine:
        raise ValueError(
            f"two ranks of the group use one device, {uuid}: {first}, and {mine}. Start at most as many "
            "ranks on a host as it has devices, and let each rank set its own, as "
            f"torch.cuda.set_device(LOCAL_RANK) does; {_SHARED_ENV}=1 allows it"
        )
