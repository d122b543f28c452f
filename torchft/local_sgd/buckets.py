"""The buffers of the collectives: each parameter alone, or all of one dtype concatenated and cut into
buckets.

A collective of any size costs some tenths of a millisecond, so a model of many small parameters is faster in
buckets. The boundaries of the pieces depend only on the sizes of the parameters, so all groups have the same
pieces.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import Optional, Sequence

import torch

from torchft._checks import switch

#: 1: LocalSGD and DiLoCo reduce in buckets, for models of many small parameters. Default: 0.
USE_BUCKETIZATION_ENV: str = "TORCHFT_USE_BUCKETIZATION"

_DEFAULT_CAP_MB = 1024


@dataclass(frozen=True)
class Buffers:
    """Memory for sending and receiving.

    Attributes:
        views: a tensor for each requested one, with its shape and type.
        pieces: the same memory, cut for sending: each piece is sent by one collective.
    """

    views: list[torch.Tensor]
    pieces: list[torch.Tensor]


def bucket_bytes(use_bucketization: bool, bucket_cap_mb: Optional[int]) -> Optional[int]:
    """The size of a piece in bytes; None if each tensor is sent by itself.

    Args:
        use_bucketization: whether there are buckets; TORCHFT_USE_BUCKETIZATION=1 (or True) does the same.
        bucket_cap_mb: largest size of a piece in MiB; default: 1024.

    Raises:
        ValueError: the cap is no positive whole number, or the variable is no switch.
    """
    if bucket_cap_mb is not None and (not isinstance(bucket_cap_mb, Integral) or bucket_cap_mb <= 0):
        raise ValueError(
            f"bucket_cap_mb={bucket_cap_mb!r}: allowed are 1 and more (MiB), None for {_DEFAULT_CAP_MB}"
        )
    if not switch(USE_BUCKETIZATION_ENV) and not use_bucketization:
        return None
    return (bucket_cap_mb or _DEFAULT_CAP_MB) << 20


def allocate(like: Sequence[torch.Tensor], cap: Optional[int]) -> Buffers:
    """Allocates undefined memory like these tensors. `cap`: largest piece in bytes; None: no buckets."""
    if cap is None:
        own = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in like]
        return Buffers(own, own)
    total: dict[tuple[torch.dtype, torch.device], int] = {}
    for t in like:
        key = t.dtype, t.device
        total[key] = total.get(key, 0) + t.numel()
    flat = {key: torch.empty(numel, dtype=key[0], device=key[1]) for key, numel in total.items()}
    used = dict.fromkeys(flat, 0)
    views = []
    for t in like:
        key = t.dtype, t.device
        views.append(flat[key][used[key] : used[key] + t.numel()].view(t.shape))
        used[key] += t.numel()
    pieces = [piece for whole in flat.values() for piece in whole.split(max(1, cap // whole.element_size()))]
    return Buffers(views, pieces)
