"""Streams and events without an accelerator."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from torchft.utils import get_stream_context, record_event, synchronize


def test_no_stream_changes_nothing() -> None:
    with get_stream_context(None):
        pass
    assert isinstance(get_stream_context(None), nullcontext)


@pytest.mark.no_device
def test_without_an_accelerator() -> None:
    synchronize()
    with pytest.raises(RuntimeError, match="needs a CUDA or XPU device"):
        record_event()


@pytest.mark.device
def test_with_cuda() -> None:
    stream = torch.cuda.Stream()
    with get_stream_context(stream):
        assert torch.cuda.current_stream() == stream
        torch.ones(10, device="cuda").sum()
        event = record_event()
    synchronize()
    assert event.query()
