"""A checkpoint offered to readers: the live tensors, or copies of them."""

from __future__ import annotations

import logging
import math
import secrets
import threading
from contextlib import closing, contextmanager
from typing import Any, Callable, Container, Dict, Generator, Iterator, List, Optional, Set, Tuple

import torch
import torch.utils._pytree as pytree

from torchft.checkpointing.codec.encoding import is_dtensor, is_plain, with_flags
from torchft.checkpointing.codec.stream import Pickled, storage_bytes, tensor_memory
from torchft.checkpointing.memory.host import HostMemory
from torchft.checkpointing.memory.reservation import NoRoom, Reservation, reserve
from torchft.checkpointing.memory.staging import StreamCopies, copies_for
from torchft.checkpointing.native.core import ON_DEVICE, Grant, NativeOffer, NativeServer
from torchft.checkpointing.source.checkpoint import Checkpoint
from torchft.checkpointing.source.pacer import Pacer
from torchft.utils import DeviceEvent, DeviceThread, current_device, use_device

logger: logging.Logger = logging.getLogger(__name__)

# Bytes sent by one call, without the GIL. When the caller needs its memory back, it waits until such a piece
# is sent.
_PIECE = 4 << 20
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
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.session = secrets.token_hex(8)  # lets a reconnecting target recognize the same bytes
        storages = checkpoint.encoded.storages
        flats = list(_small_copied([storage_bytes(storage) for storage in storages]))
        # Behind the copies of small tensors.
        copies: Dict[torch.device, Optional[StreamCopies]] = {}
        for device in {flat.device for flat in flats}:
            kind = copies_for(device.type)
            copies[device] = None if kind is None else kind(device)
        # The forward pass may run on another stream, and does not wait for this one.
        DeviceEvent(device for device, kind in copies.items() if kind is not None).wait(math.inf)
        self._blocks = {
            storage._cdata: _Block(region, flat, copies[flat.device])
            for region, (storage, flat) in enumerate(zip(storages, flats))
        }

        self._device = current_device()
        self._cond = threading.Condition()
        self._native_offers: Dict[bool, NativeOffer] = {}  # by `rest`
        self._grants: List[Grant] = []
        self._sent = 0  # bytes of the upstream format
        # pieces being sent, each with the function that cuts its reader off
        self._direct: Dict[object, Callable[[], None]] = {}
        self._room: Optional[Reservation] = None  # for the copy, until that is made
        self._failed = False  # whether there is no memory for the copy, or it failed
        # Whether the owner may change the memory, once the work that still uses it has ended.
        self._closed = False
        self._copier: Optional[threading.Thread] = None

    @property
    def served(self) -> int:
        """The bytes that were sent to targets so far."""
        with self._cond:
            return self._sent + sum(grant.served for grant in self._grants)

    def native(self, server: NativeServer, rest: bool = False) -> Optional[NativeOffer]:
        """The tensors that the native core may serve, for `rest` without those that have names; None if some
        are on a device and are not copied.
        """
        named = self.checkpoint.named if rest else {}
        with self._cond:
            blocks = list(self._blocks.values())
            needed = [block for block in blocks if block.nbytes and block.region not in named]
            away = [block for block in needed if not block.flat.is_cpu]
            if any(block.copies is None for block in away) or (away and not self._may_copy()):
                return None
            if rest not in self._native_offers:
                regions = [(block.address, 0 if block.region in named else block.nbytes) for block in blocks]
                native = self._native_offers[rest] = server.offer(regions, blocks)
                for block in blocks:
                    self._announce_copy(block)
                if self._closed:
                    native.revoke(0)
            return self._native_offers[rest]

    def _may_copy(self) -> bool:
        """Whether tensors on devices can be copied; reserves the memory for that."""
        if self._room is None and not (self._failed or self._closed):
            try:
                self._room = reserve(self.checkpoint.nbytes_on_devices, share=2)
            except NoRoom:
                self._failed = True
        return not self._failed

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

    def want(self) -> None:
        """Starts the copy of tensors on a device, when a native target asks; on a thread of the server."""
        use_device(self._device)
        with self._cond:
            away = [block for block in self._blocks.values() if block.copies is not None and block.nbytes]
            # These are not needed for the rest.
            away.sort(key=lambda block: block.region in self.checkpoint.named)
            if away and self._copier is None and not self._closed:
                self._copier = DeviceThread(target=self._copy, args=(away,), name="torchft-snapshot")
                self._copier.start()

    def _copy(self, blocks: List[_Block]) -> None:
        try:
            memory = HostMemory()
            for block in blocks:
                assert block.copies is not None
                copy = block.copy = memory.take(block.nbytes)
                with closing(block.copies.in_blocks(block.flat)) as pieces:
                    for piece in pieces:
                        if self._closed:
                            return
                        end = block.ready + piece.numel()
                        copy[block.ready : end].copy_(piece)
                        with self._cond:
                            block.ready = end
                            self._announce_copy(block)
        except Exception as error:
            logger.warning("the state to send could not be copied: %s", error)
            with self._cond:
                self._failed = True
                for native in self._native_offers.values():
                    native.copy_failed(str(error))
        finally:
            self._release_room()

    def _announce_copy(self, block: _Block) -> None:
        for rest, native in self._native_offers.items():
            if block.ready and not (rest and block.region in self.checkpoint.named):
                assert block.copy is not None
                native.copied(block.region, block.copy, block.ready)

    def _release_room(self) -> None:
        if self._room is not None:
            self._room.release()

    def read(
        self, stream: Pickled, cut_off: Callable[[], None], pacer: Pacer
    ) -> Generator[memoryview, None, None]:
        """Yields the bytes of a stream; each piece is valid until the next is requested.

        Args:
            cut_off: called to make the reader end soon, with an error
            pacer: limits the rate of the pieces; its waits use none of the caller's memory, so they delay no
                `close`

        Raises:
            ConnectionAbortedError: the offer was closed
        """
        use_device(self._device)
        pacer.wait(len(stream.prefix))
        yield memoryview(stream.prefix)
        for storage in stream.storages:
            # The ranks of a DTensor's mesh are memory of the stream.
            block = self._blocks.get(storage._cdata) or _Block(-1, storage_bytes(storage), None)
            for piece in block.flat.split(min(_PIECE, pacer.piece)) if block.nbytes else ():
                pacer.wait(piece.numel())
                with self._in_use(cut_off):
                    here = block.on_host(piece)
                    yield tensor_memory(here)
                self._sent += piece.numel()

    @contextmanager
    def _in_use(self, cut_off: Callable[[], None]) -> Iterator[None]:
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
        for native in natives:
            native.revoke(_PIECE_GRACE)
        with self._cond:
            if not self._cond.wait_for(lambda: not self._direct, _PIECE_GRACE):
                logger.warning("%d slow reader(s) of the checkpoint cut off", len(self._direct))
                for cut_off in self._direct.values():
                    cut_off()
                if not self._cond.wait_for(lambda: not self._direct, _CUT_OFF_TIMEOUT):
                    raise TimeoutError(
                        "timed out: a reader of the checkpoint did not end when its connection was cut"
                    )
        if copier is not None and copier.is_alive():
            raise TimeoutError(f"timed out: a copy of the state to send has not ended within {timeout:g} s")

    def take_copy(self) -> List[torch.Tensor]:
        """Removes the copy from a closed offer without readers, and returns it to be freed."""
        with self._cond:
            for native in self._native_offers.values():
                native.end()
            self._native_offers.clear()
            taken = [block.copy for block in self._blocks.values() if block.copy is not None]
            for block in self._blocks.values():
                block.copy, block.ready = None, 0
            return taken


def _small_copied(flats: List[torch.Tensor]) -> Iterator[torch.Tensor]:
    left = _SMALL_TENSORS
    for flat in flats:
        if flat.numel() <= min(left, _SMALL_TENSOR):
            left -= flat.numel()
            try:
                flat = flat.clone()
            except RuntimeError as error:  # not raised in the training loop
                logger.warning("a small tensor of the state to send could not be copied: %s", error)
        yield flat


class _Block:
    """The memory of one storage of the state, and its copy if there is one.

    Attributes:
        region: number of the storage in the state
        flat: its bytes
        copies: how they are copied from a device; None: they are in host memory, or on a device whose copies
            wait on the host
        copy: the copy in host memory of those on a device, of which the first `ready` bytes are complete
    """

    def __init__(self, region: int, flat: torch.Tensor, copies: Optional[StreamCopies]) -> None:
        self.region = region
        self.flat = flat
        self.nbytes = flat.numel()
        self.copies = copies
        self.copy: Optional[torch.Tensor] = None
        self.ready = 0
        self.address = flat.data_ptr() if flat.is_cpu else ON_DEVICE

    def on_host(self, piece: torch.Tensor) -> torch.Tensor:
        """Returns some of its bytes in host memory."""
        return piece.cpu() if self.copies is None else self.copies.to_host(piece)
