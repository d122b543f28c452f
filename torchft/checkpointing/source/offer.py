"""A checkpoint offered to readers: the live tensors, or copies of them."""

from __future__ import annotations

import logging
import secrets
import threading
from contextlib import closing, contextmanager
from typing import Any, Callable, Container, Dict, Generator, Iterator, List, Optional, Set, Tuple

import torch
import torch.utils._pytree as pytree

from torchft.checkpointing.codec.encoding import is_dtensor, is_plain, with_flags
from torchft.checkpointing.codec.stream import Pickled, storage_bytes, tensor_memory
from torchft.checkpointing.memory.host import HostMemory
from torchft.checkpointing.memory.reservation import Reservation
from torchft.checkpointing.memory.staging import Staged, StreamCopies, copies_for
from torchft.checkpointing.native.core import ON_DEVICE, Grant, NativeOffer, NativeServer
from torchft.checkpointing.source.checkpoint import Checkpoint
from torchft.checkpointing.source.pacer import Pacer
from torchft.utils import DeviceThread, current_device, use_device

logger: logging.Logger = logging.getLogger(__name__)

# Bytes sent by one call, without the GIL. Pieces of the caller's own memory are smaller: when the caller
# needs its memory back, it waits until such a piece is sent. Device memory is sent in the blocks of
# memory/staging.py.
_COPY_PIECE = 32 << 20
_DIRECT_PIECE = 4 << 20
# Bytes. Tensors of at most this size are copied at once, up to this total (5 ms).
_SMALL_TENSOR = 1 << 20
_SMALL_TENSORS = 16 << 20
_PIECE_GRACE = 0.1  # seconds that `close` grants a reader for its current piece
_CUT_OFF_TIMEOUT = 10.0  # seconds within which a reader must end after its connection was cut


def with_copies(
    state: object, kept: Container[int], moving: Container[int] = ()
) -> Tuple[Any, Set[torch.device]]:
    """Copies the small tensors of a state that is offered later, when a forward pass may have changed them.

    Args:
        kept: addresses of tensors that do not change before the end of the step
        moving: addresses of tensors that are copied whatever their size; of a DTensor, that of its shard

    Returns:
        the state with copies in place of these tensors, and the devices on which they are queued
    """
    copies: Dict[int, torch.Tensor] = {}
    left = _SMALL_TENSORS

    def flags(leaf: torch.Tensor) -> int:
        return leaf.requires_grad + 2 * isinstance(leaf, torch.nn.Parameter)

    def copied(leaf: Any) -> Any:
        nonlocal left
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if is_dtensor(leaf):
            moves = leaf._local_tensor.data_ptr() in moving  # type: ignore[attr-defined]
            return with_flags(leaf.detach().clone(), flags(leaf)) if moves else leaf
        if not is_plain(leaf):
            return leaf
        moves = leaf.data_ptr() in moving
        if leaf.data_ptr() in kept and not moves:
            return leaf
        storage = leaf.untyped_storage()
        if storage._cdata not in copies:
            if not moves and storage.nbytes() > min(left, _SMALL_TENSOR):
                return leaf
            left -= storage.nbytes()
            copies[storage._cdata] = storage_bytes(storage).clone()
        copy = torch.empty(0, dtype=leaf.dtype, device=leaf.device)
        copy.set_(copies[storage._cdata].untyped_storage(), leaf.storage_offset(), leaf.shape, leaf.stride())
        return with_flags(copy, flags(leaf))

    with torch.no_grad():
        state = pytree.tree_map(copied, state)
    return state, {copy.device for copy in copies.values()}


class Offer:
    """The state of one step for readers, until `close` returns the memory to its owner.

    Small tensors are copied before the constructor returns, because a forward pass changes such tensors (the
    statistics of a batch norm). Large ones change only when the optimizer steps, and are read from the
    owner's memory: a source waits for its targets before that. The native core serves tensors on a device
    from a copy in host memory, and begins to send it before it is complete. So the copy is started when the
    first target asks. If there is no memory for it, the upstream format is used.

    Args:
        room: the memory that is reserved for a copy of tensors on devices, until that is made; None: there is
            no copy
    """

    def __init__(self, checkpoint: Checkpoint, room: Optional[Reservation] = None) -> None:
        self.checkpoint = checkpoint
        self.room = room
        self.session = secrets.token_hex(8)  # lets a reconnecting target recognize the same bytes
        copies: Dict[torch.device, Optional[StreamCopies]] = {}
        self._blocks: Dict[int, _Block] = {}
        for region, storage in enumerate(checkpoint.encoded.storages):
            device = storage.device
            if device not in copies:
                kind = copies_for(device.type)
                copies[device] = None if kind is None else kind(device)
            self._blocks[storage._cdata] = _Block(region, storage, copies[device])

        self._device = current_device()
        self._cond = threading.Condition()
        self._native_offers: Dict[bool, NativeOffer] = {}  # by `rest`
        self._grants: List[Grant] = []
        self._sent = 0  # bytes of the upstream format
        # pieces being sent, each with the function that cuts its reader off
        self._direct: Dict[object, Callable[[], None]] = {}
        self._failure = ""  # why the copy failed
        # Whether the owner may change the memory, once the work that still uses it has ended.
        self._closed = False
        self._late = False  # whether `close` did not wait for a copy that was in progress
        self._copier: Optional[threading.Thread] = None
        room_left, small = _SMALL_TENSORS, []
        for block in self._blocks.values():
            if block.nbytes <= min(room_left, _SMALL_TENSOR):
                room_left -= block.nbytes
                small.append(block)
        self._copy(small)

    @property
    def served(self) -> int:
        """The bytes that were sent to targets so far."""
        with self._cond:
            return self._sent + sum(grant.served for grant in self._grants)

    def _copy(self, blocks: List[_Block]) -> None:
        try:
            memory = HostMemory()
            for block in blocks:
                for _ in block.copy(memory, lambda: self._closed):
                    with self._cond:
                        self._announce_copy(block)
                if self._closed:
                    return
        except Exception as error:
            # Not raised in the training loop: readers are cut off when the offer is closed.
            logger.warning("the state to send could not be copied: %s", error)
            with self._cond:
                self._failure = str(error)
                for native in self._native_offers.values():
                    native.copy_failed(self._failure)

    def _stage(self, blocks: List[_Block]) -> None:
        self._copy(blocks)
        self._release_room()

    def _release_room(self) -> None:
        if self.room is not None:
            self.room.release()

    def native(self, server: NativeServer, rest: bool = False) -> Optional[NativeOffer]:
        """The tensors that the native core may serve, for `rest` without those that have names; None if some
        are on a device and are not copied.
        """
        named = self.checkpoint.named if rest else {}
        with self._cond:
            blocks = list(self._blocks.values())
            needed = [block for block in blocks if block.nbytes and block.region not in named]
            if any(not (block.on_host or self._may_stage(block)) for block in needed):
                return None
            if rest not in self._native_offers:
                regions = [(block.address, 0 if block.region in named else block.nbytes) for block in blocks]
                native = self._native_offers[rest] = server.offer(regions, self.checkpoint)
                for block in blocks:
                    self._announce_copy(block)
                if self._closed:
                    native.revoke(0)
            return self._native_offers[rest]

    @contextmanager
    def granted(self, native: NativeOffer) -> Iterator[Grant]:
        """Allows one target to read through the native core."""
        grant = native.grant()
        with self._cond:
            self._grants.append(grant)
        try:
            yield grant
        finally:
            with self._cond:
                self._grants.remove(grant)
                # Closes the target's data connections, also those of a target that has failed. Otherwise they
                # would keep reading the offer.
                grant.end()

    def _may_stage(self, block: _Block) -> bool:
        return block.staged is not None and self.room is not None and not self._failure

    def want(self) -> None:
        """Starts the copy of tensors on a device, when a native target asks; on a thread of the server."""
        use_device(self._device)
        with self._cond:
            away = [
                block for block in self._blocks.values() if block.staged is not None and block.mine is None
            ]
            # These are not needed for the rest.
            away.sort(key=lambda block: block.region in self.checkpoint.named)
            if away and self._copier is None and not self._closed:
                self._copier = DeviceThread(target=self._stage, args=(away,), name="torchft-snapshot")
                self._copier.start()

    def _announce_copy(self, block: _Block) -> None:
        for rest, native in self._native_offers.items():
            if block.ready and not (rest and block.region in self.checkpoint.named):
                assert block.coming is not None
                native.copied(block.region, block.coming, block.ready)

    def read(
        self, stream: Pickled, cut_off: Callable[[], None], pacer: Pacer
    ) -> Generator[memoryview, None, None]:
        """Yields the bytes of a stream; each piece is valid until the next is requested.

        Args:
            cut_off: called to make the reader end soon, with an error
            pacer: limits the rate of the pieces; its waits use none of the caller's memory, so they delay no
                `close`

        Raises:
            ConnectionAbortedError: the offer was closed, and the rest is not copied
        """
        use_device(self._device)
        pacer.wait(len(stream.prefix))
        yield memoryview(stream.prefix)
        for storage in stream.storages:
            if storage.nbytes() == 0:
                continue
            block = self._blocks.get(storage._cdata)
            if block is None:  # the ranks of a DTensor's mesh: memory of the stream, which nobody changes
                numbers = storage_bytes(storage)
                pacer.wait(numbers.numel())
                yield tensor_memory(numbers)
                self._sent += numbers.numel()
                continue
            start = 0
            if block.staged is not None and block.mine is None:
                # device memory is in use only while a piece is copied, not while it is sent
                for piece in block.staged.read(start):
                    if self._late:
                        raise ConnectionAbortedError(
                            "the source has resumed training, and its state is not read yet"
                        )
                    for part in piece.split(min(piece.numel(), pacer.piece)):
                        pacer.wait(part.numel())
                        yield tensor_memory(part)
                        self._sent += part.numel()
                    start += piece.numel()
            while start < block.nbytes:
                largest = _DIRECT_PIECE if block.mine is None else _COPY_PIECE
                end = min(start + min(largest, pacer.piece), block.nbytes)
                pacer.wait(end - start)
                with self._in_use(block, cut_off):
                    yield tensor_memory(block.piece(start, end))
                self._sent += end - start
                start = end

    @contextmanager
    def _in_use(self, block: _Block, cut_off: Callable[[], None]) -> Iterator[None]:
        if block.mine is not None:
            yield
            return
        use = object()
        with self._cond:
            if self._closed:
                raise ConnectionAbortedError("the source has resumed training, and has no copy of its state")
            self._direct[use] = cut_off
        try:
            yield
        finally:
            with self._cond:
                del self._direct[use]
                self._cond.notify_all()

    def close(self, timeout: float) -> None:
        """Returns the memory to its owner: after this call no reader uses it. A copy in progress ends after
        its current piece, within `timeout` seconds. TimeoutError: the memory must not be changed yet.
        """
        with self._cond:
            self._closed = True  # what is copied from now on is not used
            copier, natives = self._copier, list(self._native_offers.values())
        if copier is not None:
            copier.join(timeout)
        self._release_room()
        late = copier is not None and copier.is_alive()
        self._late = self._late or late  # each commit closes the offer again
        for native in natives:
            native.revoke(_PIECE_GRACE)
        for block in self._blocks.values():
            if block.staged is not None:
                block.staged.close(wait=not self._late)  # a device that is late may hang
        with self._cond:
            if not self._cond.wait_for(lambda: not self._direct, _PIECE_GRACE):
                logger.warning("%d slow reader(s) of the checkpoint cut off", len(self._direct))
                for cut_off in self._direct.values():
                    cut_off()
                if not self._cond.wait_for(lambda: not self._direct, _CUT_OFF_TIMEOUT):
                    raise TimeoutError(
                        "timed out: a reader of the checkpoint did not end when its connection was cut"
                    )
        if late:
            raise TimeoutError(f"timed out: a copy of the state to send has not ended within {timeout:g} s")

    def take_copy(self) -> List[torch.Tensor]:
        """Removes the copy from a closed offer without readers, and returns it to be freed."""
        with self._cond:
            for native in self._native_offers.values():
                native.end()
            self._native_offers.clear()
            taken = [block.coming for block in self._blocks.values() if block.coming is not None]
            for block in self._blocks.values():
                block.mine = block.coming = None
                block.ready = 0
            return taken


class _Block:
    """One storage of the state, and its copy if there is one."""

    def __init__(self, region: int, storage: torch.UntypedStorage, copies: Optional[StreamCopies]) -> None:
        self.region = region  # number of the storage in the state
        self.nbytes = storage.nbytes()
        self.mine: Optional[torch.Tensor] = None  # the copy, once it is complete
        self.coming: Optional[torch.Tensor] = None  # the copy, also while it is incomplete
        self.ready = 0  # bytes of the copy that are complete
        self._source = storage_bytes(storage)
        self.staged = Staged(self._source, copies) if copies is not None and self.nbytes else None
        self.on_host = self.staged is None and storage.device.type == "cpu"
        self.address = self._source.data_ptr() if self.on_host else ON_DEVICE

    def copy(self, memory: HostMemory, closed: Callable[[], bool]) -> Iterator[None]:
        """Copies the storage, and yields after each part. Ends early once the memory is returned."""
        self.coming = mine = memory.take(self.nbytes)
        if self.staged is None:
            mine.copy_(self._source)
            self.ready = self.nbytes
        else:
            with closing(self.staged.read(0)) as pieces:
                for piece in pieces:
                    if closed():
                        return
                    end = self.ready + piece.numel()
                    mine[self.ready : end].copy_(piece)
                    self.ready = end
                    if end < self.nbytes:
                        yield
            if self.ready < self.nbytes:
                return
        self.mine = mine
        yield

    def piece(self, start: int, end: int) -> torch.Tensor:
        """Returns bytes to be sent by one call, on the CPU."""
        mine = self.mine
        return mine[start:end] if mine is not None else self._source[start:end].cpu()
