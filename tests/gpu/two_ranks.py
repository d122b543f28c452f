"""The parts of two ranks in the transfer of a state over their process group, on any device."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from torchft.checkpointing.pg_transport import PGTransport

STEP = 3
_VALUE = 2.0


def _state(device: torch.device, value: float) -> dict[str, Any]:
    return {
        "large": torch.full((1 << 20,), value, device=device),
        "transposed": torch.full((5, 3), value, device=device).t(),
        "half": torch.full((7,), value, dtype=torch.bfloat16, device=device),
        "scalar": torch.full((), value, device=device),
        "host": torch.full((9,), value),
        "step": STEP,
    }


def send(
    group: Any, wants: torch.device, device: torch.device, timeout: timedelta, busy: Callable[[], None]
) -> None:
    """Serves a state that was written just before, and changes it as soon as the transport allows that.

    Args:
        group: process group of two ranks; this one is rank 0.
        wants: the device on which the process group needs tensors.
        device: device that holds the state.
        busy: keeps the current stream busy.
    """
    state = _state(device, float("nan"))
    busy()
    for leaf in state.values():
        if isinstance(leaf, torch.Tensor):
            leaf.fill_(_VALUE)
    transport = PGTransport[Any](group, timeout, wants)
    transport.send_checkpoint([1], STEP, state, timeout)
    transport.disallow_checkpoint()
    for leaf in state.values():
        if isinstance(leaf, torch.Tensor):
            leaf.fill_(-1)


def receive(group: Any, wants: torch.device, device: torch.device, timeout: timedelta) -> dict[str, Any]:
    """Receives the state on rank 1. Returns its values, and the names of the tensors that were not received
    in place.
    """
    own = _state(device, 0.0)
    transport = PGTransport[Any](group, timeout, wants, lambda: own)
    got = transport.recv_checkpoint(0, transport.metadata(), STEP, timeout)
    return {
        "values": {
            name: leaf.unique().tolist() for name, leaf in got.items() if isinstance(leaf, torch.Tensor)
        },
        "elsewhere": [
            name for name, leaf in own.items() if isinstance(leaf, torch.Tensor) and got[name] is not leaf
        ],
        "step": got["step"],
    }


def check(received: dict[str, Any]) -> None:
    """Checks that this is the state that rank 0 served."""
    names = ("large", "transposed", "half", "scalar", "host")
    assert received == {"values": {name: [_VALUE] for name in names}, "elsewhere": [], "step": STEP}
