"""Registers the device "late" with PyTorch: importing this is irrevocable for the process. See the
package.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.late.build import library


def _import_library() -> Any:
    spec = importlib.util.spec_from_file_location("_late", library())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


C = _import_library()
torch.utils.rename_privateuse1_backend("late")


def _index(device: Any = None) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


class _CurrentDevice:
    def __init__(self, device: Any) -> None:
        self._index = _index(device)

    def __enter__(self) -> None:
        self._before = torch._C._accelerator_exchangeDevice(self._index)

    def __exit__(self, *_: object) -> None:
        torch._C._accelerator_maybeExchangeDevice(self._before)


def _stream(device: Any = None, priority: int = 0) -> torch.Stream:
    return torch.Stream(torch.device("late", _index(device)), priority=priority)


def _default_stream(device: Any = None) -> torch.Stream:
    kind = int(torch._C._autograd.DeviceType.PrivateUse1)
    return torch.Stream(stream_id=0, device_index=_index(device), device_type=kind)


def _manual_seed_all(seed: int) -> None:
    for index in range(C.device_count()):
        C.default_generator(index).manual_seed(seed)


def _module() -> types.ModuleType:
    """`torch.late`: the functions that PyTorch and users expect of `torch.cuda`."""
    m: Any = types.ModuleType("torch.late")
    m.is_available = lambda: True
    m.is_initialized = C.initialized
    m.init = C.initialize
    m._lazy_init = C.initialize  # as with CUDA, set_device_index initializes: then a thread's device is known
    m.is_bf16_supported = lambda: True
    m._is_in_bad_fork = C.bad_fork
    m.device_count = C.device_count
    m.current_device = lambda: torch.accelerator.current_device_index()
    m.set_device = lambda device: torch.accelerator.set_device_index(_index(device))
    m.device = _CurrentDevice
    m.synchronize = lambda device=None: torch.accelerator.synchronize(_index(device))
    m.current_stream = lambda device=None: torch.accelerator.current_stream(_index(device))
    m.set_stream = torch.accelerator.set_stream
    m.default_stream = _default_stream
    m.Stream = _stream
    m.Event = lambda enable_timing=False, blocking=False, interprocess=False: torch.Event(
        "late", enable_timing=enable_timing
    )
    m.stream = lambda s: s if s is not None else contextlib.nullcontext()
    m.default_generator = C.default_generator
    m.get_rng_state = lambda device=None: C.default_generator(_index(device)).get_state()
    m.set_rng_state = lambda state, device=None: C.default_generator(_index(device)).set_state(state)
    m.manual_seed = lambda seed: C.default_generator(_index()).manual_seed(seed) and None
    m.manual_seed_all = _manual_seed_all
    m.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    m.empty_cache = lambda: None
    m.mem_get_info = lambda device=None: (C.free_memory(_index(device)), C.free_memory(_index(device)))
    m.get_device_properties = lambda device=None: types.SimpleNamespace(
        name="late", uuid=f"late-{_index(device)}"
    )
    return m


torch._register_device_module("late", _module())


torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)

# Controls for tests; the package's docstring describes them.

delays, lazy, poison, stats, host_timeout_ms, cpu_view, contexts, fill, room_for_communicators, algorithms = (
    C.delays,
    C.lazy,
    C.poison,
    C.stats,
    C.host_timeout_ms,
    C.cpu_view,
    C.contexts,
    C.fill,
    C.room_for_communicators,
    C.algorithms,
)


@contextlib.contextmanager
def captured() -> Iterator[None]:
    """Another thread captures a graph, in PyTorch's default mode: a query of an event on a thread in that
    mode raises, and invalidates the graph. An invalid graph is an error at the end.
    """
    C.begin_capture()
    try:
        yield
    finally:
        valid = C.end_capture()
    assert valid, "a query of an event has invalidated the graph"


def _ids(stream: torch.Stream | None) -> tuple[int, int]:
    return (-1, -1) if stream is None else (stream.device_index, stream.stream_id)


def hold(stream: torch.Stream | None = None) -> None:
    C.hold(*_ids(stream))


def release(stream: torch.Stream | None = None) -> None:
    C.release(*_ids(stream))


def step(stream: torch.Stream | None = None, n: int = 1) -> None:
    C.step(*_ids(stream), n)


def pending(stream: torch.Stream | None = None) -> int:
    return C.pending(*_ids(stream or torch.accelerator.current_stream()))


def enqueue(function: Callable[[], object], stream: torch.Stream | None = None) -> int:
    return C.enqueue(function, *_ids(stream or torch.accelerator.current_stream()))


@contextlib.contextmanager
def held(stream: torch.Stream | None = None) -> Iterator[None]:
    hold(stream)
    try:
        yield
    finally:
        release(stream)


def reset() -> None:
    """Undoes a test's settings: nothing is held or delayed, all streams are idle, no error is left, and the
    contexts of the next test are counted anew.
    """
    release()
    lazy(0)
    delays(0, 0, 0)
    poison(True)
    host_timeout_ms(60000)
    if C.initialized():
        for index in range(C.device_count()):
            fill(index, False)
            room_for_communicators(index, -1, 0)
        C.drain()
        C.forget_contexts()
        algorithms()


@atexit.register
def _drain() -> None:
    if C.initialized() and not C.bad_fork():
        try:
            reset()
        except RuntimeError as e:
            print("late: at exit:", e, file=sys.stderr)
