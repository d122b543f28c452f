"""Streams and events without an accelerator."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchft import utils
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


# Files whose threads touch no device, or set it themselves.
PLAIN_THREADS = {
    "_waits.py": "says one line",
    "_manager/quorum/notices.py": "Failures calls enter_thread for each notice",
    "_manager/quorum/rounds.py": "Manager._follow calls enter_thread",
    "_manager/signals.py": "asks for a drain",
    "checkpointing/client/sources.py": "its threads use the network only; the receiving thread copies",
    "checkpointing/http_transport.py": "accepts connections; Offer sets the device on their threads",
    "checkpointing/snapshots/writer.py": "uses files only",
    "data/workers.py": "ends a process",
    "_handoff.py": "a function runs on the device of the thread that hands it off",
    "dlrover/rendezvous.py": "uses the network only",
    "ftlib/gossip.py": "uses the network only",
    "ftlib/shared_storage.py": "uses files only",
    "futures.py": "a callback runs on the device of the thread that set its timer",
    "http.py": "starts without PyTorch; the servers' handlers set the device",
    "parameter_server.py": "accepts connections; _serve sets the device on their threads",
    "process_group/_gloo/loops.py": "changes sockets",
    "process_group/isolated/channel.py": "copies host memory; sets the device for the end",
    "utils.py": "DeviceThread",
}


def test_threads_that_may_touch_a_device_set_it() -> None:
    """A thread that stays on device 0 makes a context there, which takes the memory of another rank."""
    package = Path(utils.__file__).parent
    found = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if re.search(
            r"threading\.(Thread|Timer)\(|from threading import|\(threading\.Thread\)", path.read_text()
        )
    }
    assert found == set(PLAIN_THREADS), "use DeviceThread, or say here why not"


@pytest.mark.parametrize(
    ("about", "expected"),
    [
        ({"pci_domain_id": 0, "pci_bus_id": 0x3A, "pci_device_id": 0}, "0000:3a:00.0"),
        ({"pci_domain_id": 0x10000, "pci_bus_id": 1, "pci_device_id": 2}, "10000:01:02.0"),
        ({"name": "of an older PyTorch"}, None),
    ],
)
def test_the_pci_address_of_the_current_device(
    about: dict[str, Any], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = SimpleNamespace(
        get_device_properties=lambda index: SimpleNamespace(**about) if index == 3 else None
    )
    monkeypatch.setattr(torch, "get_device_module", lambda: module)
    monkeypatch.setattr(utils, "current_device", lambda: 3)
    assert utils.device_pci_address() == expected
    monkeypatch.setattr(utils, "current_device", lambda: None)
    assert utils.device_pci_address() is None
