"""States as files of torch.distributed.checkpoint, which its own reader loads without torchft.

A process makes the files offline: from the structure and the memory of a rank's state, without process
groups. Each rank's state is a list of items: a part of a tensor, or an object. Ranks and groups that hold the
same item share the work (:func:`assign`); one that has the results of all makes the metadata
(:func:`write_metadata`).

Items depend on the state alone: tensors are cut at 64 MiB, and a shard's place in its tensor follows from the
rank and the DTensor's placements.
"""

from __future__ import annotations

import dataclasses
import io
import math
import os
import zlib
from collections import ChainMap
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from torchft.checkpointing.codec.encoding import decode, tensor_at
from torchft.checkpointing.snapshots.shares import WHOLE, Share
from torchft.checkpointing.transport import CheckpointError

CUT = 64 << 20  # bytes of a tensor in one item, if its first dimension allows that
METADATA = ".metadata"

Items = List[WriteItem]
Parts = Dict[MetadataIndex, int]
Mappings = Dict[str, Tuple[Any, ...]]  # the path of each item's name in the state
Files = Dict[str, Tuple[int, int]]  # size and CRC32 of each file, by name
Watch = Callable[[int], None]  # is told of each write: its bytes


class DiskError(CheckpointError):
    """A state cannot be written as a checkpoint; the message says which part of it, and why."""


class Content:
    """What one rank's state adds to a checkpoint.

    Attributes:
        items: what it adds.
        mappings: the path of each item's name in the state.
        parts: of the items, by index, where the groups keep parts of the state (``shares.py``); an item that
            is missing here is kept by all groups.

    Args:
        tree: the structure of the state, decoded from JSON (``codec/encoding.py``).
        flats: the memory of each region, as flat tensors of bytes.
        rank: the rank in the group, by which DTensors name the members of their meshes.
        what: name of the state in errors.
        share: what the regions have of the state.
        given: the part of each region, as in the table of a slot; empty: all groups have all.

    Raises:
        DiskError: a tensor's place is not known.
        CheckpointError: the structure is malformed, or an object's class cannot be imported.
    """

    def __init__(
        self,
        tree: Any,
        flats: List[torch.Tensor],
        rank: int,
        what: str,
        share: Share = WHOLE,
        given: Sequence[Optional[int]] = (),
    ) -> None:
        self._share = share
        parts = {_memory(flat): part for flat, part in zip(flats, given) if part is not None}
        shards: Dict[int, Tuple[List[int], List[int]]] = {}  # shape of the whole and place in it, by id

        def shard(path: Tuple[str, ...], node: List[Any]) -> Optional[torch.Tensor]:
            if node[0] != "D":
                return None
            name = f"{what}: {''.join(path)}"
            if node[1][0] != "T" or node[2][0] != "spec":
                raise DiskError(f"{name} is a DTensor whose place in the whole tensor is not known")
            local = tensor_at(flats[node[1][1]], node[1])
            shards[id(local)] = place_of(node[2], list(local.shape), rank, name)
            return local

        # Only this user's processes write to what this reads, as to a checkpoint, which PyTorch unpickles.
        state = decode(tree, flats, what, shard, trusted=True)
        flat = DefaultSavePlanner()
        flat.set_up_planner(state, is_coordinator=True)
        self.mappings: Mappings = flat.mappings
        self.items: Items = []
        self.parts: Parts = {}
        self._values: Dict[MetadataIndex, Any] = {}
        for fqn, value in flat.state_dict.items():
            if isinstance(value, torch.Tensor):
                whole, at = shards.get(id(value)) or (list(value.shape), [0] * value.dim())
                of = parts.get(_memory(value))
                for begin, part in _cut(value):
                    self._add_tensor(fqn, part, whole, [at[0] + begin, *at[1:]] if at else at, of)
            else:
                self._add(WriteItem(MetadataIndex(fqn), WriteItemType.BYTE_IO), value)

    def _add_tensor(
        self, fqn: str, part: torch.Tensor, whole: List[int], at: List[int], of: Optional[int]
    ) -> None:
        if part.numel() == 0 and 0 not in whole:
            return  # the rows of other ranks are all
        properties = TensorProperties(dtype=part.dtype, requires_grad=part.requires_grad)
        chunk = ChunkStorageMetadata(torch.Size(at), torch.Size(part.shape))
        data = TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(whole))
        index = MetadataIndex(fqn, at)
        if of is not None:
            self.parts[index] = of
        self._add(WriteItem(index, WriteItemType.SHARD, tensor_data=data), part)

    def _add(self, item: WriteItem, value: Any) -> None:
        self.items.append(item)
        self._values[item.index] = value

    def value(self, index: MetadataIndex) -> Any:
        """Returns the tensor or object of an item. DiskError: this state has no such item."""
        if not self._share.has(self.parts.get(index)):
            raise DiskError(f"this group has {self._share} of the state, which lacks {index.fqn}")
        try:
            return self._values[index]
        except KeyError:
            raise DiskError(
                f"this state has no {index.fqn} at {index.offset}: the groups' states differ"
            ) from None


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _cut(tensor: torch.Tensor) -> Iterable[Tuple[int, torch.Tensor]]:
    """Yields parts of a tensor of at most CUT bytes along its first dimension, and where each begins."""
    if tensor.nbytes <= CUT or tensor.dim() == 0:
        yield 0, tensor
        return
    rows = max(1, CUT * len(tensor) // tensor.nbytes)
    for begin in range(0, len(tensor), rows):
        yield begin, tensor[begin : begin + rows]


def place_of(spec: List[Any], local: List[int], rank: int, name: str) -> Tuple[List[int], List[int]]:
    """Returns the shape of a DTensor, and where the shard of a rank begins in it.

    Args:
        spec: the description of a DTensorSpec (``codec/dtensor.py``).
        local: the shape of the shard.
        rank: the rank, a member of the mesh.
        name: of the tensor, in errors.

    Raises:
        DiskError: the place is not known, or does not have the shard's shape.
    """
    _, (_, ranks, names, _, cut), placements, meta, order = spec
    members = torch.tensor(ranks)
    found = (members == rank).nonzero()
    if meta is None or len(found) != 1:
        raise DiskError(f"{name} is a DTensor on a mesh of ranks {ranks}, in which rank {rank} has no place")
    sizes, at = dict(enumerate(members.shape)), dict(enumerate(found[0].tolist()))
    if cut is not None:
        dims = [(names or []).index(each) if each in (names or []) else -1 for each in cut]
        if -1 in dims:
            raise DiskError(f"{name} is a DTensor on {cut}, which is no part of a mesh of {names}")
        sizes, at = {i: sizes[dim] for i, dim in enumerate(dims)}, {i: at[dim] for i, dim in enumerate(dims)}
    whole = list(meta[0])
    rows: List[Any] = [range(size) for size in whole]
    first = [number for _, dims in order or [] for number in dims]  # the others in the order of the mesh
    for number in [*first, *(set(range(len(placements))) - set(first))]:
        tag, *items = placements[number]
        if tag == "R":
            continue
        if tag not in ("S", "SS"):
            raise DiskError(f"{name} is a DTensor with partial sums: reduce it before it is saved")
        dim, pieces = items[0], items[1] if tag == "SS" else 1
        rows[dim] = _rows(rows[dim], pieces, sizes[number], at[number])
    for has, size in zip(rows, local):
        if len(has) != size or (size and has[-1] - has[0] != size - 1):
            raise DiskError(
                f"{name} is a shard of shape {local}, which is not one part of {whole} at rank {rank}"
            )
    return whole, [has[0] if has else 0 for has in rows]


def _rows(of: Sequence[int], pieces: int, parts: int, part: int) -> Sequence[int]:
    """Returns the part that a dimension of the mesh leaves of some rows, divided as ``torch.chunk`` does."""
    if pieces == 1:
        size = -(-len(of) // parts)
        return of[size * part : size * (part + 1)]
    size = -(-len(of) // pieces) or 1
    return [row for i in range(0, len(of), size) for row in _rows(of[i : i + size], 1, parts, part)]


def size_of(item: WriteItem) -> int:
    """Returns the bytes of an item; of an object, which is small, 1."""
    data = item.tensor_data
    return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize if data is not None else 1


def assign(ranks: Sequence[Items], parts: int, given: Sequence[Parts] = ()) -> List[List[Items]]:
    """Says who writes what: a pure function of what the ranks have.

    Args:
        ranks: the items of each rank. Of several that have an item, the one with the least to do writes it.
        parts: the number of groups that share the work of a rank.
        given: the part of each item of a rank that not all groups have.

    Returns:
        The items of each part of each rank.
    """
    owners: Dict[MetadataIndex, List[int]] = {}
    for rank, items in enumerate(ranks):
        for item in items:
            owners.setdefault(item.index, []).append(rank)
    shares: List[List[Items]] = [[[] for _ in range(parts)] for _ in ranks]
    loads = [[0] * parts for _ in ranks]
    for rank, items in enumerate(ranks):
        for item in items:
            having = owners[item.index]
            if having[0] != rank:
                continue  # assigned already
            least = min(having, key=lambda each: sum(loads[each]))
            part = given[least].get(item.index) if given else None
            if part is None:
                part = min(range(parts), key=loads[least].__getitem__)
            loads[least][part] += size_of(item)
            shares[least][part].append(item)
    return shares


class Written(NamedTuple):
    """What one process has written: a result for each item, and the files."""

    results: List[WriteResult]
    files: Files


class _Values(DefaultSavePlanner):
    """Gives the values of items to the writer of PyTorch."""

    def __init__(self, content: Content) -> None:
        super().__init__()
        self._content = content

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self._content.value(index)


class _Checked(io.BufferedWriter):
    """A new file with the CRC of what was written to it."""

    def __init__(self, path: Path, watch: Watch) -> None:
        super().__init__(io.FileIO(path, "xb"))
        self._watch = watch
        self.size, self.crc = 0, 0

    def write(self, data: Any) -> int:
        count = super().write(data)
        self.size, self.crc = self.size + count, zlib.crc32(data, self.crc)
        self._watch(count)
        return count

    def fileno(self) -> int:
        self.flush()  # PyTorch 2.7 asks for this only, before fsync
        return super().fileno()


class _CheckedFiles(FileSystem):
    def __init__(self, watch: Watch) -> None:
        self.files: Files = {}
        self._watch = watch

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[io.IOBase, None, None]:
        with _Checked(Path(path), self._watch) as file:
            yield file
        self.files[Path(path).name] = file.size, file.crc


def write(
    folder: Path, name: str, items: Items, content: Content, watch: Watch = lambda count: None
) -> Written:
    """Writes items to a new file, and waits until the disk has it.

    Args:
        folder: where; it exists.
        name: beginning of the file's name, which no other file has.
        items: of ``content``.
        watch: called with the number of bytes after each write; what it raises ends the writing.

    Raises:
        OSError: the file cannot be written. What was written of it is removed, if that is possible.
        DiskError: the content lacks an item.
    """
    if not items:
        return Written([], {})
    # Copies ahead would begin to use a device, which the process that writes must not.
    writer, files = FileSystemWriter(folder, per_thread_copy_ahead=0), _CheckedFiles(watch)
    writer.fs = files
    (plan,) = writer.prepare_global_plan([SavePlan(items)])
    kind = type(plan.storage_data)
    plan = dataclasses.replace(plan, storage_data=kind(f"{name}_"))
    try:
        results = writer.write_data(plan, _Values(content)).wait()
    except BaseException:
        for left in folder.glob(f"{name}_*"):
            left.unlink(missing_ok=True)
        raise
    return Written(results, files.files)


def write_metadata(
    folder: Path, items: Items, mappings: Iterable[Mappings], written: Iterable[Written]
) -> None:
    """Writes the metadata of a checkpoint to a folder.

    Args:
        folder: an empty one.
        items: of all.
        mappings: of all ranks.
        written: the results of all.

    Raises:
        DiskError: something of a tensor is in no file.
        OSError: the metadata cannot be written.
    """
    missing = _missing(items)
    if missing:
        raise DiskError(f"no rank has all of {', '.join(missing[:3])}{' …' * (len(missing) > 3)}")
    _, metadata = create_default_global_save_plan([SavePlan(items)])
    metadata = dataclasses.replace(metadata, planner_data=dict(ChainMap(*mappings)))
    FileSystemWriter(folder).finish(metadata, [each.results for each in written])


def _missing(items: Items) -> List[str]:
    """Returns the names of tensors whose parts are not as large as the whole."""
    left: Dict[str, int] = {}
    for item in items:
        data = item.tensor_data
        if data is not None:
            whole = math.prod(data.size)
            left[item.index.fqn] = left.get(item.index.fqn, whole) - math.prod(data.chunk.sizes)
    return [name for name, elements in left.items() if elements]


def sync(folder: Path) -> None:
    """Waits until the disk has the names in a folder, where its file system can be asked."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    except OSError:
        pass  # some file systems cannot; then they do so by themselves
    finally:
        os.close(file)
