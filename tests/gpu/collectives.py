"""Collectives of a process group on a device with one rank."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.distributed_c10d import AllgatherOptions, AllToAllOptions, ReduceScatterOptions

from tests.gpu.device import DEVICE


def check_gathering(group: Any, tensor: torch.Tensor) -> None:
    """Gathers, scatters and exchanges a tensor of 4 elements. With one rank, the result is the tensor
    itself.
    """
    out = torch.zeros(4, device=DEVICE)
    group.broadcast_one(tensor, 0).wait()
    group.barrier().wait()
    group.allgather([[out]], [tensor], AllgatherOptions()).wait()
    assert torch.equal(out, tensor)
    for name, opts in (
        ("allgather_into_tensor_coalesced", AllgatherOptions()),
        ("reduce_scatter_tensor_coalesced", ReduceScatterOptions()),
    ):
        out.zero_()
        getattr(group, name)([out], [tensor], opts).wait()
        assert torch.equal(out, tensor), name
    out.zero_()
    group.reduce_scatter([out], [[tensor]], ReduceScatterOptions()).wait()
    assert torch.equal(out, tensor)
    out.zero_()
    group.alltoall_base(out, tensor, [], [], AllToAllOptions()).wait()
    assert torch.equal(out, tensor)
    assert group.errored() is None
