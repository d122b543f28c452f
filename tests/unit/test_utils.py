"""Streams and events where there are none."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from torchft.utils import get_stream_context, record_event, synchronize

no_accelerator = pytest.mark.skipif(torch.accelerator.is_available(), reason="about hosts without an accelerator")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_no_stream_changes_nothing() -> None:
    with get_stream_context(None):
        pass
    assert isinstance(get_stream_context(None), nullcontext)


@no_accelerator
def test_without_an_accelerator() -> None:
    synchronize()
    with pytest.raises(RuntimeError, match="needs a CUDA or XPU device"):
        record_event()


@needs_cuda
def test_with_cuda() -> None:
    stream = torch.cuda.Stream()
    with get_stream_context(stream):
        assert torch.cuda.current_stream() == stream
        torch.ones(10, device="cuda").sum()
        event = record_event()
    synchronize()
    assert event.query()
