"""Isolated groups on the test device: torchft's code for CUDA memory and events, with this device in place of
CUDA.

This module replaces the functions of PyTorch and of the driver that the code calls for CUDA. Another process
can map a storage's memory by its name; the memory stays allocated until that process reports that it no
longer uses it. Another process can also wait for an event. As with CUDA, a stream that waits for an event of
a killed process never continues. Streams write values to registered memory of the host, and wait for them
there.
"""

from __future__ import annotations

import importlib.util
import types
from typing import Any, ClassVar

import torch
from torch.distributed import ProcessGroup, Store

from tests.late import load
from torchft.process_group.isolated import cuda, protocol
from torchft.process_group.isolated.groups import ProcessGroupBabyNCCL
from torchft.process_group.isolated.sharing import Notify, Sharing

_late = load()


class _Event:
    """Like `torch.cuda.Event`."""

    def __init__(self, event: Any = None, interprocess: bool = True) -> None:
        assert interprocess
        self._event = _late.C.IpcEvent() if event is None else event

    def record(self, stream: torch.Stream) -> None:
        self._event.record(stream.device_index, stream.stream_id)

    def wait(self, stream: torch.Stream) -> None:
        self._event.wait(stream.device_index, stream.stream_id)

    def query(self) -> bool:
        return self._event.query()

    def ipc_handle(self) -> bytes:
        return f"{self._event.region} {self._event.place}".encode()

    @classmethod
    def from_ipc_handle(cls, device: torch.device, handle: bytes) -> _Event:
        name, place = handle.decode().split()
        return cls(_late.C.IpcEvent(name, int(place)))


def _share(storage: torch.UntypedStorage) -> tuple[Any, ...]:
    """Like `UntypedStorage._share_cuda_`."""
    size = storage.nbytes()
    if size == 0:
        return storage.device.index, None, 0, 0, None, 0, b"", False
    name, offset = _late.C.share(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))
    return storage.device.index, f"{name} {offset}".encode(), size, 0, name.encode(), offset, b"", False


def _new_shared(device: int, handle: bytes, size: int, *_: Any) -> torch.UntypedStorage:
    name, offset = handle.decode().split()
    return _late.C.import_bytes(name, int(offset), size, device).untyped_storage()


class _Torch(types.ModuleType):
    """PyTorch with the test device in place of CUDA."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.cuda: Any = types.SimpleNamespace(
            **{
                name: getattr(torch.late, name)
                for name in ("current_device", "current_stream", "device", "stream")
            },  # type: ignore[attr-defined]
            **{name: getattr(torch.late, name) for name in ("set_device", "set_stream", "Stream")},  # type: ignore[attr-defined]
            Event=_Event,
            ipc_collect=lambda: None,
            synchronize=torch.late.synchronize,  # type: ignore[attr-defined]
        )
        self.UntypedStorage: Any = types.SimpleNamespace(
            _new_shared_cuda=_new_shared,
            _release_ipc_counter_cuda=lambda name, offset: _late.C.unshare(offset),
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class Driver:
    """Like `torchft.process_group.isolated.driver.CudaDriver`, whose calls make its device the thread's
    current one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device.index or 0

    def register(self, address: int, size: int) -> int:
        torch._C._accelerator_exchangeDevice(self._device)
        return _late.C.register_words(address, size)

    def write(self, stream: torch.Stream, address: int, value: int) -> None:
        torch._C._accelerator_exchangeDevice(self._device)
        _late.C.write_value(stream.device_index, stream.stream_id, address, value)

    def wait(self, stream: torch.Stream, address: int, value: int) -> None:
        torch._C._accelerator_exchangeDevice(self._device)
        _late.C.wait_value(stream.device_index, stream.stream_id, address, value)


def _adapted() -> Any:
    """A second instance of the CUDA module, for this device."""
    assert cuda.__spec__ is not None and cuda.__file__ is not None
    spec = importlib.util.spec_from_file_location(f"{__name__}_sharing", cuda.__file__)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.torch, module._DEVICE = _Torch(), "late"
    module.driver = types.SimpleNamespace(driver_of=Driver)
    return module


sharing = _adapted()
protocol.DEVICES += ("late",)  # registered in the trainer and in its workers
torch.UntypedStorage._share_cuda_ = _share  # type: ignore[method-assign, assignment]


def trainer(notify: Notify) -> Sharing:
    return sharing.trainer(notify)


def worker() -> Sharing:
    return sharing.worker()


def prepare(device: torch.device) -> None:
    sharing.prepare(device)


class ProcessGroupBabyLate(ProcessGroupBabyNCCL):
    """`ProcessGroupBabyNCCL` on the test device, whose backend in the worker follows NCCL's rules."""

    _name: ClassVar[str] = "torchft-baby-late"
    _device: ClassVar[str] = "late"
    _sharing: ClassVar[dict[str, str]] = {"late": __name__}
    # Range of the delays of the worker's tasks.
    delays_us: ClassVar[tuple[int, int]] = (0, 0)

    @classmethod
    def _create_pg(cls, store: Store, rank: int, world_size: int) -> ProcessGroup:
        from tests.late import group  # noqa: F401  # the test device's backend takes the place of NCCL's

        _late.delays(1, *cls.delays_us)
        return super()._create_pg(store, rank, world_size)
