"""Streams and events of whatever accelerator there is; without one these do nothing."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Optional, Union, cast

import torch

if TYPE_CHECKING:
    import torch.cuda
    import torch.xpu

__all__ = ["get_stream_context", "record_event", "synchronize"]


def get_stream_context(
    stream: Optional[torch.Stream],
) -> Union[torch.cuda.StreamContext, torch.xpu.StreamContext, nullcontext[None]]:
    """A context in which `stream` is the current one; None leaves the current stream as it is."""
    if stream is None:
        return nullcontext()
    if torch.cuda.is_available():
        return torch.cuda.stream(cast(torch.cuda.Stream, stream))
    if torch.xpu.is_available():
        return torch.xpu.stream(cast(torch.xpu.Stream, stream))
    return nullcontext()


def record_event() -> Union[torch.cuda.Event, torch.xpu.Event]:
    """Records an event on the current stream and returns it.

    Raises:
        RuntimeError: there is no accelerator, so there is no stream to record on.
    """
    if torch.cuda.is_available():
        return cast(torch.cuda.Event, torch.cuda.current_stream().record_event())
    if torch.xpu.is_available():
        return cast(torch.xpu.Event, torch.xpu.current_stream().record_event())
    raise RuntimeError("record_event needs a CUDA or XPU device, this host has none")


def synchronize() -> None:
    """Waits for everything queued on the current device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    elif torch.xpu.is_available():
        torch.xpu.synchronize()
