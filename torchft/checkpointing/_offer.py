"""A checkpoint offered to readers: the live tensors, or copies of them."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from contextlib import closing, contextmanager
from typing import Callable, Dict, Generator, Iterator, List, Optional

import torch

from torchft.checkpointing._checkpoint import Checkpoint
from torchft.checkpointing._copying import Copying, Readers
from torchft.checkpointing._memory import HostMemory
from torchft.checkpointing._native_transfer import ON_DEVICE, NativeOffer, Server
from torchft.checkpointing._pacer import Pacer
from torchft.checkpointing._room import Reservation
from torchft.checkpointing._staging import Copies, Staged, copies_for
from torchft.checkpointing._stream import Pickled, storage_bytes, tensor_memory
from torchft.utils import DeviceThread, current_device, use_device

logger: logging.Logger = logging.getLogger(__name__)

# Bytes sent by one call, without the GIL. Pieces of the caller's own memory are smaller: when the caller needs its
# memory back, it waits until such a piece is sent. Device memory is sent in the blocks of _staging.py.
_COPY_PIECE = 32 << 20
_DIRECT_PIECE = 4 << 20
# Bytes. Tensors of at most this size are copied at once, up to this total (5 ms).
_SMALL_TENSOR = 1 << 20
_SMALL_TENSORS = 16 << 20
# Seconds in which a target must begin to read. While it reads, the large tensors are not copied: the target
# participates in the step, so it has finished before the source changes its state, and a copy would only waste
# memory.
_COPY_DELAY = 1.0
_PIECE_GRACE = 0.1  # seconds that `close` grants a reader for its current piece
_CUT_OFF_TIMEOUT = 10.0  # seconds within which a reader must end after its connection was cut


class Offer:
    """The state of one step for readers, until `close` returns the memory to its owner.

    With `copy`, a thread copies the tensors in the background, and `close` waits for the copy instead of the readers,
    which then read the copy. Small tensors are copied before the constructor returns, because a forward pass changes
    such tensors (the statistics of a batch norm); large ones change only when the optimizer steps.

    The native core serves tensors on a device from such a copy, and begins to send it before it is complete. So the
    copy is started when the first target asks. If there is no memory for it, the upstream format is used.

    Args:
        checkpoint: the state
        copy: whether to copy all tensors in the background
        stage: whether to copy tensors on a device when a target asks for them, even without `copy`
        room: the memory that is reserved for the copy, until it is made
    """

    def __init__(
        self, checkpoint: Checkpoint, copy: bool, stage: bool = False, room: Optional[Reservation] = None
    ) -> None:
        self.checkpoint = checkpoint
        self.copies = copy
        self.stages = stage or copy
        self._room = room
        self.session = secrets.token_hex(8)  # lets a reconnecting target recognize the same bytes
        self._copying = Copying()
        copies: Dict[torch.device, Optional[Copies]] = {}
        self._blocks: Dict[int, _Block] = {}
        for region, storage in enumerate(checkpoint.encoded.storages):
            device = storage.device
            if device not in copies:
                kind = copies_for(device.type)
                copies[device] = None if kind is None else kind(device)
            self._blocks[storage._cdata] = _Block(region, storage, copies[device], self._copying)

        self._device = current_device()
        self._cond = threading.Condition()
        self._native_offer: Optional[NativeOffer] = None
        # pieces being sent, each with the function that cuts its reader off
        self._direct: Dict[object, Callable[[], None]] = {}
        self._failure = ""  # why the copy failed
        self._late = False  # whether `close` did not wait for all copies that were in progress
        self._copier: Optional[threading.Thread] = self._start_copy() if copy else None

    @property
    def complete(self) -> bool:
        """Whether everything is copied."""
        return all(block.mine is not None for block in self._blocks.values())

    def _start_copy(self) -> Optional[threading.Thread]:
        room = _SMALL_TENSORS
        small: List[_Block] = []
        large: List[_Block] = []
        for block in self._blocks.values():
            if block.nbytes <= min(room, _SMALL_TENSOR):
                room -= block.nbytes
                small.append(block)
            else:
                large.append(block)
        self._copy(small)
        if not large:
            return None
        thread = DeviceThread(target=self._copy_later, args=(large,), name="torchft-snapshot")
        thread.start()
        return thread

    def _copy_later(self, blocks: List[_Block]) -> None:
        start = time.monotonic()
        with self._cond:
            self._cond.wait_for(self._copying.copies_device, _COPY_DELAY)
        self._copy([block for block in blocks if block.staged is not None])
        with self._cond:
            self._cond.wait_for(lambda: self._copying.hurries, max(0.0, start + _COPY_DELAY - time.monotonic()))
            self._cond.wait_for(self._copying.copies_host)
        self._copy([block for block in blocks if block.staged is None])

    def _copy(self, blocks: List[_Block]) -> None:
        try:
            memory = HostMemory()
            for block in blocks:
                on_device = block.staged is not None
                if self._copying.skips(on_device):
                    return
                for _ in block.copy(memory):
                    with self._cond:
                        self._announce_copy(block)
                    if self._copying.skips(on_device):
                        return
            if self.complete:
                self._release_room()
        except Exception as error:
            # Not raised in the training loop: readers are cut off when the offer is closed.
            logger.warning("the state to send could not be copied: %s", error)
            self._release_room()
            with self._cond:
                self._failure = str(error)
                if self._native_offer is not None:
                    self._native_offer.copy_failed(self._failure)

    def _release_room(self) -> None:
        if self._room is not None:
            self._room.release()

    def native(self, server: Server) -> Optional[NativeOffer]:
        """The tensors that the native core may serve; None if some are on a device and are not copied."""
        with self._cond:
            blocks = list(self._blocks.values())
            if any(block.nbytes and not (block.on_host or self._may_stage(block)) for block in blocks):
                return None
            if self._native_offer is None:
                self._native_offer = server.offer([(block.address, block.nbytes) for block in blocks], self.checkpoint)
                for block in blocks:
                    self._announce_copy(block)
                if self._copying.closed:
                    self._native_offer.revoke(0)
            return self._native_offer

    def _may_stage(self, block: _Block) -> bool:
        return block.staged is not None and self.stages and not self._failure

    def want(self) -> None:
        """Called on a thread of the server when a target asks for the offer: starts the copy of tensors on a device."""
        use_device(self._device)
        with self._cond:
            self._copying.read(Readers.NATIVE)
            self._cond.notify_all()
            away = [block for block in self._blocks.values() if block.staged is not None]
            if away and self._copier is None and not self.complete and self._copying.starts_device():
                self._copier = DeviceThread(target=self._copy, args=(away,), name="torchft-snapshot")
                self._copier.start()

    def _announce_copy(self, block: _Block) -> None:
        if self._native_offer is not None and block.ready:
            assert block.coming is not None
            self._native_offer.copied(block.region, block.coming, block.ready)

    def read(self, stream: Pickled, cut_off: Callable[[], None], pacer: Pacer) -> Generator[memoryview, None, None]:
        """Yields the bytes of a stream; each piece is valid until the next is requested.

        Args:
            stream: one of the checkpoint's streams
            cut_off: called to make the reader end soon, with an error
            pacer: limits the rate of the pieces; its waits use none of the caller's memory, so they delay no `close`

        Raises:
            ConnectionAbortedError: the offer was closed, and the rest is not copied
        """
        use_device(self._device)
        with self._cond:
            self._copying.read(Readers.SOME)
        pacer.wait(len(stream.prefix))
        yield memoryview(stream.prefix)
        for storage in stream.storages:
            if storage.nbytes() == 0:
                continue
            block = self._blocks[storage._cdata]
            start = 0
            if block.staged is not None and block.mine is None:
                # device memory is in use only while a piece is copied, not while it is sent
                for piece in block.staged.read(start):
                    if self._late:
                        raise ConnectionAbortedError("the source has resumed training, and its state is not read yet")
                    for part in piece.split(min(piece.numel(), pacer.piece)):
                        pacer.wait(part.numel())
                        yield tensor_memory(part)
                    start += piece.numel()
            while start < block.nbytes:
                largest = _DIRECT_PIECE if block.mine is None else _COPY_PIECE
                end = min(start + min(largest, pacer.piece), block.nbytes)
                pacer.wait(end - start)
                with self._in_use(block, cut_off):
                    yield tensor_memory(block.piece(start, end))
                start = end

    @contextmanager
    def _in_use(self, block: _Block, cut_off: Callable[[], None]) -> Iterator[None]:
        if block.mine is not None:
            yield
            return
        use = object()
        with self._cond:
            if self._copying.closed:
                raise ConnectionAbortedError("the source has resumed training, and has no copy of its state")
            self._direct[use] = cut_off
        try:
            yield
        finally:
            with self._cond:
                del self._direct[use]
                self._cond.notify_all()

    def abort_copy(self) -> None:
        """Stops a copy that is not needed any more, after the current tensor."""
        with self._cond:
            self._copying.unneeded()
            self._cond.notify_all()

    def close(self, keep_copy: bool, timeout: float) -> None:
        """Returns the memory to its owner: after this call no reader uses it.

        Args:
            keep_copy: whether to complete the copy for later readers; otherwise it is aborted
            timeout: limit for the copy in seconds

        Raises:
            TimeoutError: the memory is still in use; it must not be changed
        """
        with self._cond:
            if keep_copy:
                self._copying.due()
            else:
                self._copying.abort()
            self._cond.notify_all()
            copier = self._copier
        if copier is not None:
            copier.join(timeout)
        self._release_room()
        with self._cond:
            late = copier is not None and copier.is_alive()
            self._late = self._late or late  # each commit closes the offer again
            self._copying.close()  # also if a copy is in progress: what it copies from now on is not used
            native = self._native_offer
        if native is not None:
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
                    raise TimeoutError("timed out: a reader of the checkpoint did not end when its connection was cut")
        if late:
            raise TimeoutError(f"timed out: the state to send was not copied within {timeout:g} s")

    def take_copy(self) -> List[torch.Tensor]:
        """Removes the copy from a closed offer without readers, and returns it to be freed."""
        with self._cond:
            if not self._copying.closed:
                return []  # a copy may still be in progress
            if self._native_offer is not None:
                self._native_offer.end()
                self._native_offer = None
            taken = [block.coming for block in self._blocks.values() if block.coming is not None]
            for block in self._blocks.values():
                block.mine = block.coming = None
                block.ready = 0
            return taken


class _Block:
    """One storage of the state, and its copy if there is one."""

    def __init__(self, region: int, storage: torch.UntypedStorage, copies: Optional[Copies], copying: Copying) -> None:
        self.region = region  # number of the storage in the state
        self.nbytes = storage.nbytes()
        self.mine: Optional[torch.Tensor] = None  # the copy, once it is complete
        self.coming: Optional[torch.Tensor] = None  # the copy, also while it is incomplete
        self.ready = 0  # bytes of the copy that are complete
        self._source = storage_bytes(storage)
        self._copying = copying
        self.staged = Staged(self._source, copies) if copies is not None and self.nbytes else None
        self.on_host = self.staged is None and storage.device.type == "cpu"
        self.address = self._source.data_ptr() if self.on_host else ON_DEVICE

    def copy(self, memory: HostMemory) -> Iterator[None]:
        """Copies the storage in parts, and yields after each part."""
        self.coming = mine = memory.take(self.nbytes)
        if self.staged is None:
            mine.copy_(self._source)  # PyTorch releases the GIL here
            if self._copying.closed:  # the owner may have changed the memory meanwhile
                return
            self.ready = self.nbytes
        else:
            with closing(self.staged.read(0)) as pieces:
                for piece in pieces:
                    if self._copying.closed:
                        return
                    end = self.ready + piece.numel()
                    mine[self.ready : end].copy_(piece)
                    self.ready = end
                    if end < self.nbytes:
                        yield
            if self.ready < self.nbytes:
                return  # the memory was returned to its owner
        self.mine = mine
        yield

    def piece(self, start: int, end: int) -> torch.Tensor:
        """Returns bytes to be sent by one call, on the CPU."""
        mine = self.mine
        return mine[start:end] if mine is not None else self._source[start:end].cpu()
