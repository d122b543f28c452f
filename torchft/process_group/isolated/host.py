"""Sharing of CPU memory.

A caller's storage cannot be moved: other views of it, for example in NumPy, must see the results. So a tensor
is copied into memory that both processes map, and back. That memory is kept and reused, because its pages are
allocated and mapped by the worker already. A tensor in shared memory of PyTorch (`share_memory_()`) is
registered without a copy.
"""

from __future__ import annotations

import itertools
import mmap
import os
import threading
import weakref
from queue import SimpleQueue
from typing import Any, NamedTuple, Optional
from weakref import WeakKeyDictionary

import torch

from torchft.process_group.isolated._native import copy
from torchft.process_group.isolated.sharing import Borrowing, Notify, Registration, Sharing
from torchft.utils import dtype_name

_MAP, _UNMAP = "map", "unmap"  # notes: with the region, and its size in bytes

# Slots are powers of two of at least this many bytes; small ones are cut from regions of _REGION bytes.
_SMALLEST = 1 << 10
_REGION = 1 << 20

# Below this size a copy is cheaper than a look-up of the tensor's memory.
_ASK_ABOVE = 1 << 16

# Tensors of these types are plain memory.
_PLAIN = (torch.Tensor, torch.nn.Parameter)

# Where PyTorch creates shared memory; containers often have little of it.
_SHARED_MEMORY = "/dev/shm"


def share(tensor: torch.Tensor) -> bool:
    """Moves the tensor's storage to shared memory; see `ProcessGroup.share_buffer`."""
    if tensor.layout is not torch.strided:
        return False
    storage = tensor.untyped_storage()
    if not storage.is_shared():
        try:
            room = os.statvfs(_SHARED_MEMORY)
            # A write to a full file system would end the process.
            if storage.nbytes() > room.f_bavail * room.f_frsize // 2:
                return False
            # pyrefly: ignore [missing-attribute]  # a method in C, not declared
            storage._share_fd_cpu_()
        except (OSError, RuntimeError):
            return False
    return _descriptor(storage) is not None


class _Slot(NamedTuple):
    """A piece of memory for one registration at a time."""

    region: int
    offset: int
    memory: torch.Tensor
    address: int


class _Staged(Registration):
    """A registration of a copy of `size` bytes, which begins with the tensor's first element."""

    def __init__(
        self, ref: Any, tensor: torch.Tensor, size: int, write: bool, slot: _Slot, free: list[_Slot]
    ) -> None:
        super().__init__(ref)
        self._tensor = tensor
        self._size = size
        self._write = write
        self._slot = slot
        self._free = free

    def fetch(self) -> None:
        if self._write:
            copy(self._tensor.data_ptr(), self._slot.address, self._size)

    def release(self) -> None:
        self._free.append(self._slot)


class _Converted(_Staged):
    """A registration of a copy whose layout differs from the tensor's memory."""

    def __init__(
        self, ref: Any, tensor: torch.Tensor, read: bool, write: bool, slot: _Slot, free: list[_Slot]
    ) -> None:
        super().__init__(ref, tensor, tensor.nbytes, write, slot, free)
        self._view = slot.memory[: self._size].view(tensor.dtype).view(tensor.shape)
        if read:
            with torch.no_grad():
                self._view.copy_(tensor)

    def fetch(self) -> None:
        if self._write:
            with torch.no_grad():
                self._tensor.copy_(self._view)


class _Trainer(Sharing):
    """Host memory has no queued work: an operation has finished when the worker answers."""

    def __init__(self, notify: Notify) -> None:
        self._notify = notify
        self._lock = threading.Lock()
        self._regions = itertools.count()
        self._free: dict[int, list[_Slot]] = {}
        # The regions of storages that are in shared memory already, and those whose storage was freed.
        self._storages: WeakKeyDictionary[torch.UntypedStorage, int] = WeakKeyDictionary()
        self._freed: SimpleQueue[int] = SimpleQueue()

    def register(self, tensor: torch.Tensor, read: bool, write: bool) -> Registration:
        if tensor.layout is not torch.strided:
            raise RuntimeError(f"tensor of layout {tensor.layout}: an isolated group takes dense tensors")
        contiguous = tensor.is_contiguous()
        size = tensor.nbytes if contiguous else _span(tensor) * tensor.element_size()
        if size >= _ASK_ABOVE and contiguous:
            region = self._share(tensor)
            if region is not None:
                offset = int(tensor.storage_offset()) * tensor.element_size()
                return Registration(_ref(region, offset, tensor, True))
        slot, free = self._take(size)
        ref = _ref(slot.region, slot.offset, tensor, contiguous)
        try:
            if type(tensor) not in _PLAIN or tensor.is_conj() or tensor.is_neg():
                if not contiguous:
                    tensor, read = tensor.detach().as_strided((_span(tensor),), (1,)), True
                return _Converted(ref, tensor, read, write, slot, free)
            # A tensor that is not contiguous is copied with the gaps between its elements, also if the
            # operation only writes: `fetch` copies the gaps back. So Gloo gets the layout of the caller's
            # memory.
            if read or not contiguous:
                copy(slot.address, tensor.data_ptr(), size)
        except BaseException:
            free.append(slot)
            raise
        return _Staged(ref, tensor, size, write, slot, free)

    def _take(self, size: int) -> tuple[_Slot, list[_Slot]]:
        size = max(_SMALLEST, 1 << max(0, size - 1).bit_length())
        free = self._free.get(size)
        if free is None:
            with self._lock:
                free = self._free.setdefault(size, [])
        try:
            return free.pop(), free
        except IndexError:
            pass
        slots = self._allocate(size)
        free.extend(slots[1:])
        return slots[0], free

    def _allocate(self, size: int) -> list[_Slot]:
        total = max(size, _REGION)
        region = next(self._regions)
        descriptor = os.memfd_create("torchft-isolated", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, total)
            memory = _map(descriptor, total)
            self._notify((_MAP, region, total), descriptor, None)
        finally:
            os.close(descriptor)
        address = memory.data_ptr()
        return [_Slot(region, at, memory[at : at + size], address + at) for at in range(0, total, size)]

    def _share(self, tensor: torch.Tensor) -> Optional[int]:
        """The region of a tensor's storage; None if the storage is not in memory that can be registered."""
        if tensor.is_conj() or tensor.is_neg():
            return None
        storage = tensor.untyped_storage()
        with self._lock:
            region = self._storages.get(storage)
            if region is not None:
                return region
            descriptor = _descriptor(storage)
            if descriptor is None:
                return None
            while not self._freed.empty():
                self._notify((_UNMAP, self._freed.get(), 0), None, None)
            region = next(self._regions)
            self._notify((_MAP, region, os.fstat(descriptor).st_size), descriptor, None)
            self._storages[storage] = region
            weakref.finalize(storage, self._freed.put, region).atexit = False
            return region

    def close(self) -> None:
        with self._lock:
            self._free = {}
            self._storages.clear()


class _Worker(Borrowing):
    def __init__(self) -> None:
        self._regions: dict[int, torch.Tensor] = {}

    def notified(self, note: Any, descriptor: Optional[int]) -> None:
        action, region, size = note
        if action == _UNMAP:
            self._regions.pop(region, None)
            return
        assert descriptor is not None
        try:
            self._regions[region] = _map(descriptor, size)
        finally:
            os.close(descriptor)

    def borrow(self, ref: Any) -> torch.Tensor:
        region, offset, dtype, shape, stride = ref
        # Slices and views of the region, so that PyTorch checks that the tensor lies within it.
        dtype = getattr(torch, dtype)
        memory = self._regions[region][offset:]
        rest = memory[: memory.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
        if stride is None:
            return rest[: torch.Size(shape).numel()].view(shape)
        return rest.as_strided(shape, stride)


trainer, worker = _Trainer, _Worker


def _descriptor(storage: torch.UntypedStorage) -> Optional[int]:
    """The file that a storage maps; None if there is none, or if PyTorch has not kept it open."""
    if not storage.is_shared():
        return None
    try:
        # Not _share_fd_cpu_, which moves any other kind of storage.
        # pyrefly: ignore [missing-attribute]  # a method in C, not declared
        descriptor = storage._get_shared_fd()
    except RuntimeError:
        return None
    return descriptor if descriptor >= 0 else None


def _map(descriptor: int, size: int) -> torch.Tensor:
    # The tensor keeps the mapping alive, and the mapping has its own descriptor.
    return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)


def _span(tensor: torch.Tensor) -> int:
    """The number of elements of the storage, from the tensor's first one, that it may reach."""
    if tensor.numel() == 0:
        return 0
    reach = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride()))
    left = tensor.untyped_storage().nbytes() // tensor.element_size() - int(tensor.storage_offset())
    return min(max(reach, tensor.numel()), left)


def _ref(region: int, offset: int, tensor: torch.Tensor, contiguous: bool) -> tuple[Any, ...]:
    """Region, offset in bytes, dtype, sizes, and strides unless contiguous."""
    stride = None if contiguous else tensor.stride()
    return region, offset, dtype_name(tensor.dtype), (*tensor.shape,), stride
