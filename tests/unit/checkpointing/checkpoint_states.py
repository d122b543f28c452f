"""State dicts like those of real jobs, and the check that one was received completely."""

from __future__ import annotations

import collections
import datetime
import os
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import nn


def into(state: object) -> Any:
    """A target that receives into these tensors."""
    from torchft.checkpointing.client.target import TargetState  # upstream has none

    return TargetState(lambda: state, writable=True)


def training_state(seed: int = 0) -> dict[str, Any]:
    """The state that a Manager sends for a small model after one step, with all kinds of values that a user
    may add.
    """
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
    model(torch.randn(2, 1, 8, 8)).sum().backward()
    optimizer.step()
    scheduler.step()
    return {
        "user": {
            "default": {
                "model": model.state_dict(),
                "optim": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
            },
            "tensors": odd_tensors(),
            "values": plain_values(),
        },
        "torchft": {"step": 3 + seed, "batches_committed": 6},
    }


def odd_tensors() -> dict[str, torch.Tensor]:
    base = torch.randn(6, 4)
    return {
        "bf16": torch.randn(5).bfloat16(),
        "zero_dim": torch.tensor(7, dtype=torch.int64),
        "bool": torch.tensor([True, False]),
        "complex": torch.tensor(3 + 2j),
        "empty": torch.empty(0, 3),
        "channels_last": torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        "transposed": torch.randn(3, 5).T,
        "strided": torch.arange(20.0)[::3],
        "shared": base,
        "shared_view": base[2:4],
        "parameter": nn.Parameter(torch.randn(3)),
        "frozen_parameter": nn.Parameter(torch.randn(3), requires_grad=False),
        "sparse": torch.eye(3).to_sparse(),
        "fp8": torch.randn(4).to(torch.float8_e4m3fn),
    }


def plain_values() -> dict[str, Any]:
    return {
        "none": None,
        "big": 2**80,
        "float": 0.1,
        "text": "größe",
        "bytes": b"\x00\xff",
        "no_bytes": b"",
        "tuple": (1, "a", (2.5, None)),
        "set": {1, 2},
        "list": [1, [2, [3]]],
        "ordered": collections.OrderedDict(b=1, a=2),
        "counter": collections.Counter({2: 1}),
        "default": collections.defaultdict(list, {"x": [1]}),
        "deque": collections.deque([1, 2], maxlen=3),
        "int_keys": {0: "a", 1: {"b": 2}},
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "timedelta": datetime.timedelta(seconds=90),
        "numpy_scalar": np.float64(0.25),
        "numpy_array": np.arange(6, dtype=np.int32).reshape(2, 3),
        "numpy_random": np.random.RandomState(0).get_state(),
        "torch_random": torch.get_rng_state(),
    }


def assert_same(got: Any, want: Any) -> None:
    """Checks that structure, types and bytes are equal."""
    got_leaves, got_spec = pytree.tree_flatten_with_path(got)
    want_leaves, want_spec = pytree.tree_flatten_with_path(want)
    assert got_spec == want_spec
    for (path, a), (_, b) in zip(got_leaves, want_leaves, strict=True):
        where = pytree.keystr(path)
        assert type(a) is type(b), where
        if isinstance(b, torch.Tensor):
            assert a.dtype == b.dtype and a.shape == b.shape and a.requires_grad == b.requires_grad, where
            dense_a, dense_b = (t.detach().to_dense() if t.is_sparse else t.detach() for t in (a, b))
            assert torch.equal(_bytes(dense_a), _bytes(dense_b)), where
        elif isinstance(b, np.ndarray):
            assert a.dtype == b.dtype and np.array_equal(a, b), where
        else:
            assert a == b, where


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


class Evil:
    """Runs a command when it is unpickled without restrictions."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.system, (f"echo run > {self.path}",))
