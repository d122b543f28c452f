"""Writes and reads PyTorch's streaming format without extra copies of tensors.

A stream is a pickled list of records (name, whether it is a storage, length), then the records' bytes: the
pickled structure, the byte order, and each storage. PyTorch's own writer and reader of this format read a
storage into a `bytes` and copy it twice, with the GIL held; here the bytes go between the socket and the
storage's own memory.
"""

from __future__ import annotations

import collections
import copyreg
import ctypes
import io
import pickle
import sys
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
import torch._weights_only_unpickler as restricted
from torch.serialization import _load, _serialization_tls, location_tag

from torchft.checkpointing._serialization import _Entry, allow_checkpoint_types, explain, pickle_allowed
from torchft.checkpointing.memory.host import HostMemory, flat_storage
from torchft.checkpointing.transport import CheckpointError, Interrupted

_PROTOCOL = 2  # the only one that the restricted unpickler reads
# Returns the storage to receive into, given a storage and the name of its device at the source.
Home = Callable[[torch.UntypedStorage, str], torch.UntypedStorage]
Count = Callable[[int], None]  # given a number of bytes
_READ_PIECE = 32 << 20  # bytes per read at most, so that the progress is visible


def _no_count(nbytes: int) -> None:
    pass


def storage_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """The storage as a flat tensor of bytes, without a copy."""
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return flat.set_(storage) if storage.nbytes() else flat


def tensor_memory(flat: torch.Tensor) -> memoryview:
    """The memory of a flat tensor of bytes on the CPU. The caller keeps the tensor alive."""
    if flat.numel() == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * flat.numel()).from_address(flat.data_ptr())).cast("B")


@dataclass
class Pickled:
    """A pickled object without its storages."""

    structure: bytes
    storages: List[torch.UntypedStorage]

    @cached_property
    def prefix(self) -> bytes:
        """The stream up to the first storage."""
        order = sys.byteorder.encode()
        entries = [_Entry("data.pkl", False, len(self.structure)), _Entry("byteorder", False, len(order))]
        entries += [_Entry(f"data/{i}", True, storage.nbytes()) for i, storage in enumerate(self.storages)]
        return pickle.dumps(entries, protocol=_PROTOCOL) + self.structure + order

    @property
    def nbytes(self) -> int:
        """Length of the whole stream."""
        return len(self.prefix) + sum(storage.nbytes() for storage in self.storages)


# The restricted unpickler appends items to lists and dicts only, so items are passed to the constructor.
_REDUCERS: Dict[type, Any] = {
    collections.deque: lambda d: (collections.deque, (list(d), d.maxlen)),
    collections.defaultdict: lambda d: (collections.defaultdict, (d.default_factory, dict(d))),
}
_STORAGES = (torch.storage.TypedStorage, torch.UntypedStorage)


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=_PROTOCOL)
        self.dispatch_table = {**copyreg.dispatch_table, **_REDUCERS}
        self.storages: Dict[Tuple[int, torch.dtype], torch.UntypedStorage] = {}
        self._keys: Dict[Tuple[int, torch.dtype], str] = {}

    def persistent_id(self, obj: object) -> Optional[Tuple[Any, ...]]:
        # A cheap test, because it is called for every object that is pickled.
        if not isinstance(obj, _STORAGES):
            return None
        if isinstance(obj, torch.storage.TypedStorage):
            storage, dtype, numel = obj._untyped_storage, obj.dtype, obj._size()
            kind = getattr(torch, obj._pickle_storage_type())
        else:
            storage, dtype, numel, kind = obj, torch.uint8, obj.nbytes(), torch.UntypedStorage
        # Tensors that share a storage share it after loading too. A storage used with two dtypes becomes two
        # records, because the format has one dtype for each record.
        identity = (storage._cdata, dtype)
        key = self._keys.setdefault(identity, str(len(self._keys)))
        self.storages[identity] = storage
        return ("storage", kind, key, location_tag(storage), numel)


def pickle_object(obj: object) -> Pickled:
    """Pickles structure and plain values now. The tensors are not copied."""
    data = io.BytesIO()
    pickler = _Pickler(data)
    pickler.dump(obj)
    return Pickled(data.getvalue(), list(pickler.storages.values()))


@dataclass
class _Records:
    """Replaces the zip file that PyTorch's loader expects."""

    data: Dict[str, bytes] = field(default_factory=dict)
    storages: Dict[str, torch.Tensor] = field(default_factory=dict)

    def has_record(self, name: str) -> bool:
        return name in self.data or name in self.storages

    def get_record(self, name: str) -> bytes:
        return self.data[name]

    def get_storage_from_record(self, name: str, nbytes: int, _type: object) -> torch.Tensor:
        flat = self.storages[name]
        if flat.numel() != nbytes:
            raise CheckpointError(f"record {name} has {flat.numel()} bytes, its tensors need {nbytes}")
        return flat

    def serialization_id(self) -> str:
        return "torchft"


def read_object(
    file: io.BufferedIOBase,
    what: str,
    size: Optional[int] = None,
    home: Optional[Home] = None,
    expect: Count = _no_count,
    count: Count = _no_count,
) -> Any:
    """Reads one stream to its end and returns the object.

    Args:
        file: file to read the stream from; its buffer serves the many small reads, large reads bypass it
        size: length of the stream in bytes, if it is known
        home: chooses the storage to receive into, given a storage and the name of its device at the source.
            Default: the given storage
        expect, count: called with the bytes that the stream announces, and with those that have arrived

    Raises:
        CheckpointError: the stream is cut short or malformed, or contains a type that is not allowed
    """
    allow_checkpoint_types()
    try:
        entries = _EntriesUnpickler(file).entries()
    except (OSError, CheckpointError):
        raise
    except Exception as error:
        raise explain(error, f"{what}: its list of records") from error

    announced = sum(entry.length for entry in entries)
    if size is not None and announced > size:
        # checked before memory is allocated for it
        raise CheckpointError(f"{what} announces {announced} bytes in its records, and has {size} in all")
    expect(announced)
    records, memory = _Records(), HostMemory()
    for entry in entries:
        if entry.is_storage:
            flat = flat_storage(entry.length, what, torch.device("cpu"), memory)
            _fill(file, tensor_memory(flat), entry, what, count)
            records.storages[entry.key] = flat
        else:
            data = bytearray(entry.length)
            _fill(file, memoryview(data), entry, what, count)
            records.data[entry.key] = bytes(data)
    if file.read(1):
        raise CheckpointError(f"{what} goes on after its last record")
    return _make_object(records, what, home=home)


def unpickle(structure: bytes, storages: List[torch.Tensor], what: str, trusted: bool) -> Any:
    """The object of a `Pickled`. CheckpointError: it is malformed, or contains a type that is not allowed.

    Args:
        storages: as flat tensors of bytes
        trusted: whether this process pickled it, so that it may hold any type
    """
    allow_checkpoint_types()
    records = _Records({"data.pkl": structure}, {f"data/{i}": flat for i, flat in enumerate(storages)})
    return _make_object(records, what, trusted)


def _make_object(records: _Records, what: str, trusted: bool = False, home: Optional[Home] = None) -> Any:
    structure = records.data.get("data.pkl", b"")
    if b"torch.distributed.tensor" in structure:
        import torch.distributed.tensor  # noqa: F401  its import allows the parts of a DTensor

    def place(storage: torch.UntypedStorage, device: str) -> torch.UntypedStorage:
        placed = storage if home is None else home(storage, device)
        # A DTensor is made after its local tensor, on this device. PyTorch refuses a function here.
        _serialization_tls.map_location = placed.device
        return placed

    try:
        return _load(records, place, pickle if trusted or pickle_allowed() else restricted, encoding="utf-8")
    except CheckpointError as error:
        raise CheckpointError(f"{what}: {error}") from None
    except Exception as error:
        raise explain(error, what) from error


class _EntriesUnpickler(pickle.Unpickler):
    """Reads the list of records. PyTorch's unpickler takes 0.1 ms for each of perhaps thousands."""

    def __init__(self, file: io.BufferedIOBase) -> None:
        super().__init__(file)
        # A forged pickle can set attributes of the class itself, so each unpickler has its own class.
        self._record = type("_Record", (), {})

    def find_class(self, module: str, name: str) -> type:
        if (module, name) != (_Entry.__module__, _Entry.__qualname__):
            raise pickle.UnpicklingError(f"unexpected {module}.{name}")
        return self._record

    def entries(self) -> List[_Entry]:
        loaded = self.load()
        if not isinstance(loaded, list) or not all(type(record) is self._record for record in loaded):
            raise ValueError("no list of records")
        return [_entry(vars(record)) for record in loaded]


def _entry(fields: Dict[str, Any]) -> _Entry:
    key, is_storage, length = fields.get("key"), fields.get("is_storage"), fields.get("length")
    if not (
        isinstance(key, str) and isinstance(is_storage, bool) and isinstance(length, int) and length >= 0
    ):
        raise ValueError("no list of (name, kind, length)")
    return _Entry(key, is_storage, length)


def _fill(file: io.BufferedIOBase, memory: memoryview, entry: _Entry, what: str, count: Count) -> None:
    done = 0
    while done < entry.length:
        n = file.readinto(memory[done : done + _READ_PIECE])
        if not n:
            raise Interrupted(
                f"{what} was cut short: record {entry.key} ends after {done} of {entry.length} bytes"
            )
        done += n
        count(n)
