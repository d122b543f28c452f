"""The target's side of a transfer: chooses the format, runs the native data plane, and handles broken connections."""

from __future__ import annotations

import logging
import threading
import time
from functools import partial
from typing import Any, Callable, Dict, List, Optional, Sequence, Set, Tuple

import torch

from torchft.addresses import host_port
from torchft.checkpointing._deadline import Deadline
from torchft.checkpointing._encoding import Path, decode, storage_bytes
from torchft.checkpointing._handshake import DONE, Structure, Ticket, parse_structure, read_frame
from torchft.checkpointing._http_client import Answer, Busy, ask, describe
from torchft.checkpointing._landing import Landing, is_staged
from torchft.checkpointing._memory import HostMemory, flat_storage, reserve_for_state
from torchft.checkpointing._native_transfer import ON_DEVICE, Fetch, Status
from torchft.checkpointing._places import Places, local_part, tensor_nodes, tensors_by_path
from torchft.checkpointing._progress import Progress, summary
from torchft.checkpointing._retry import Attempts
from torchft.checkpointing._room import Reservation
from torchft.checkpointing._source import Part
from torchft.checkpointing._staging import copies_for
from torchft.checkpointing._target import CPU, Homes, Target
from torchft.checkpointing._upstream import FULL
from torchft.checkpointing.transport import AdditionalSource, CheckpointError, Interrupted, Role
from torchft.http import _DeadlineSocket

logger: logging.Logger = logging.getLogger(__name__)

REST = "rest"  # the state without the regions that have names
Memory = Callable[[Any, int], torch.Tensor]  # given a part's value and bytes, returns host memory as a flat tensor

_SLICE = 0.5  # seconds between two checks of the progress
_HELP_AFTER = 0.1  # seconds; for a shorter transfer additional sources are not worth asking
_SOURCE_CONNECT = 3.0  # seconds within which an additional source must answer
_SOURCE_END = 1.0  # seconds for a thread of an additional source to end, after its connection was cut


class SourceFailed(Interrupted):
    """The source failed during the transfer; a retry may succeed."""


class Abandon:
    """Aborts a transfer from another thread: a failed source may keep its connections open and send nothing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reason: Optional[Exception] = None
        self._socket: Optional[_DeadlineSocket] = None

    def because(self, reason: Exception) -> None:
        with self._lock:
            self._reason = self._reason or reason
            if self._socket is not None:
                self._socket.abort()

    def connected(self, sock: _DeadlineSocket) -> None:
        with self._lock:
            self._socket = sock
            if self._reason is not None:
                sock.abort()

    def check(self, what: str) -> None:
        """Raises CheckpointError if the transfer was aborted."""
        if self._reason is not None:
            raise CheckpointError(f"{what}: {self._reason}") from self._reason


class Transfer:
    """A transfer into memory. Received data is kept when a connection breaks.

    Args:
        go: the native library
        ticket: the source's first frame of the handshake
        regions: the memory, as flat tensors of bytes
        keep: keeps that memory alive
        checked: whether blocks carry checksums
        what: names the transfer in errors

    Attributes:
        received: bytes that have arrived
    """

    received = 0

    def __init__(
        self, go: Any, ticket: Ticket, regions: Sequence[torch.Tensor], keep: object, checked: bool, what: str
    ) -> None:
        self.session = ticket.session
        self._what = what
        self._landing = Landing(regions, ticket.block_size, what)
        pairs = [(ON_DEVICE if is_staged(region) else region.data_ptr(), region.numel()) for region in regions]
        kept = [keep, self._landing]
        self._fetch = Fetch(go, pairs, kept, ticket.block_size, checked, stall=10.0, window=self._landing.window)
        self._landing.begin(self._fetch)

    def run(self, address: str, secret: str, deadline: Deadline, progress: Progress, abandon: Abandon) -> Status:
        """Fetches from a source until everything has arrived.

        Raises:
            SourceFailed: the source failed
            CheckpointError: the received data is wrong
            TimeoutError: the deadline has passed
        """
        self._fetch.add(address, secret)
        most = self.received  # blocks that are damaged are not counted any more
        while True:
            left = deadline.left
            if left <= 0:
                raise TimeoutError("timed out")
            abandon.check(self._what)
            status = self._fetch.wait(min(_SLICE, left))
            self._landing.take(self._fetch, status.full)
            if status.received > most:
                most = status.received
                deadline.arrived()
            self.received = status.received
            progress.update(status.received, status.total)
            if status.failure:
                raise CheckpointError(f"{self._what}: {status.failure}")
            if status.done:
                return status
            if not status.running:
                raise SourceFailed(f"{self._what}: {'; '.join(dict.fromkeys(status.failed))}")

    def close(self) -> None:
        """Ends the transfer. After this call nothing writes to the memory."""
        self._fetch.end()
        self._landing.close()


class StateTransfer(Transfer):
    """The transfer of one state.

    Args:
        go, ticket, checked, what: as in :class:`Transfer`
        structure: the source's second frame of the handshake
        own: the local state, to be filled in place; its structure must equal that of the received one
        target: chooses the devices of tensors if there is no ``own``, and has the regions with names
    """

    def __init__(
        self,
        go: Any,
        ticket: Ticket,
        structure: Structure,
        own: Optional[object],
        target: Optional[Target],
        checked: bool,
        what: str,
    ) -> None:
        self._tree = structure.tree
        self._sizes = structure.sizes
        mine: Dict[Path, torch.Tensor] = {}
        if own is not None:
            mine = tensors_by_path(own)
        elif target is not None and target.writable:
            mine = target.own()
        self._room: Optional[Reservation] = None
        devices = _devices(structure)
        self._places = Places(structure.tree, structure.sizes, mine, what, _can_fill, strict=own is not None)
        if target is not None and own is None and not target.writable:
            target.devices = devices
            away = sum(structure.sizes[i] for i in structure.devices if i < len(structure.sizes))
            self._room = reserve_for_state(away, what)
        # With a target whose tensors must not be written, `mine` is empty, and `Homes` chooses host memory for all.
        home = partial(_same_kind, what) if own is None and target is None else Homes(mine, devices).of
        memory = HostMemory()
        self._flats = [
            flat_storage(0 if self._places.has(i) else size, what, self._home(i, structure, home), memory)
            for i, size in enumerate(structure.sizes)
        ]
        regions = [self._places.region(i) if self._places.has(i) else flat for i, flat in enumerate(self._flats)]
        self._add_named(structure, target, what)
        super().__init__(go, ticket, regions, [self._flats, self._places], checked, what)

    def _add_named(self, structure: Structure, target: Optional[Target], what: str) -> None:
        """Takes the regions that are not received, because the target has them."""
        for region, name in structure.named.items():
            try:
                if target is None or target.has is None or structure.sizes[region] != 0:
                    raise KeyError("it was not to be left out")
                self._flats[region] = storage_bytes(target.has(*name))
            except LookupError as error:
                raise CheckpointError(f"{what}: its region {region} is left out: {error!r}") from error

    def _home(self, region: int, structure: Structure, home: Callable[[str], torch.device]) -> torch.device:
        """The device for a region that is not received into a local tensor."""
        staged = self._places.has(region) or region in self._places.copied
        return CPU if staged else home(structure.devices.get(region, "cpu"))

    def help(self, address: str, secret: str, sizes: List[int]) -> bool:
        """Adds an additional source. Returns False if its state has another layout."""
        if sizes != self._sizes:
            return False
        self._fetch.add(address, secret, Role.ADDITIONAL)
        return True

    def state(self) -> Any:
        """Returns the state, once everything has arrived."""
        self.close()
        return decode(self._tree, self._flats, self._what, self._places.fill(self._flats))

    def close(self) -> None:
        super().close()
        if self._room is not None:
            self._room.release()


class AdditionalSources:
    """Additional sources of a transfer. A separate thread fetches from each of them until the block ends.

    None of them is required: an error of one is logged, and the transfer continues with the others.
    """

    def __init__(
        self,
        transfer: StateTransfer,
        additional_sources: Sequence[AdditionalSource],
        step: int,
        key: str,
        deadline: Deadline,
        token: str,
    ) -> None:
        self._transfer = transfer
        self._step = step
        self._key = key
        self._deadline = deadline
        self._token = token
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._talking: Set[Optional[int]] = set()
        self._sockets: List[_DeadlineSocket] = []
        self._threads = [
            threading.Thread(target=self._ask, args=(one,), daemon=True, name="torchft-source")
            for one in additional_sources
        ]

    def __enter__(self) -> AdditionalSources:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._over.set()
            for sock in self._sockets:
                sock.abort()
            talking = [thread for thread in self._threads if thread.ident in self._talking]
        # Threads without a connection end by themselves and do nothing more; they are not waited for, because the
        # group that they ask may have failed.
        for thread in talking:
            thread.join(_SOURCE_END)

    def _connected(self, sock: _DeadlineSocket) -> None:
        with self._lock:
            self._talking.add(threading.get_ident())
            self._sockets.append(sock)
            if self._over.is_set():
                sock.abort()

    def _ask(self, locate: AdditionalSource) -> None:
        if self._over.wait(_HELP_AFTER):
            return
        try:
            metadata = locate()
            if self._over.is_set():
                return
            what = describe(metadata, self._step, self._key)
            # a source that does not answer at once is useless
            deadline = Deadline(min(self._deadline.left, _SOURCE_CONNECT))
            with ask(metadata, self._step, self._key, deadline, self._token, True, self._connected) as answer:
                if answer.control is None or answer.sock is None:
                    return
                ticket, structure = _frames(answer, what)
                if self._over.is_set():
                    return
                if not self._transfer.help(host_port(answer.host, ticket.port), ticket.secret, structure.sizes):
                    logger.info("%s: its state has another structure than the assigned source's", what)
                    return
                while (left := self._deadline.left) > 0 and not self._over.wait(left):
                    pass  # data that has arrived meanwhile has moved the deadline
        except Exception as error:
            if not self._over.is_set():
                logger.info("an additional source failed: %s", error)


def receive(
    go: Any,
    metadata: str,
    step: int,
    key: str,
    deadline: Deadline,
    *,
    token: str = "",
    checked: bool = True,
    own: Optional[Callable[[], object]] = None,
    target: Optional[Target] = None,
    upstream: Callable[[Answer], Any],
    additional_sources: Sequence[AdditionalSource] = (),
    abandon: Optional[Abandon] = None,
) -> Any:
    """Fetches a state: in the native format if both sides support it, else in the upstream format.

    Args:
        go: the native library; None if it cannot be used
        metadata, step, key, token: see `_http_client.ask`
        deadline: of the whole transfer
        checked: whether blocks carry checksums
        own: returns the local state, to be filled in place; it must equal the received one in structure
        target: chooses the devices of tensors if there is no ``own``
        upstream: reads an answer in the upstream format
        additional_sources: functions that return the metadata of additional sources
        abandon: aborts the transfer before the deadline

    Raises:
        CheckpointError, TimeoutError: see `CheckpointTransport.recv_checkpoint`
    """
    what = describe(metadata, step, key)
    shown = Progress(what, logger)
    transfer: Optional[StateTransfer] = None
    attempts, start = Attempts(), time.monotonic()
    abandon = abandon or Abandon()
    try:
        while True:
            abandon.check(what)
            before = transfer.received if transfer else 0
            try:
                with ask(metadata, step, key, deadline, token, go is not None, abandon.connected) as answer:
                    if answer.control is None:
                        return upstream(answer)
                    transfer, ticket = _open(go, answer, transfer, own, target, checked, what)
                    additional = additional_sources if checked else ()
                    with AdditionalSources(transfer, additional, step, _native(key), deadline, token):
                        status = transfer.run(
                            host_port(answer.host, ticket.port), ticket.secret, deadline, shown, abandon
                        )
                    _send_done(answer, deadline)
                logger.info("%s: %s, digest %s", what, summary(status.total, time.monotonic() - start), status.digest)
                return transfer.state()
            except CheckpointError as error:
                abandon.check(what)
                if not isinstance(error, Interrupted):
                    raise
                progress = transfer is not None and transfer.received > before
                pause = attempts.failed(progress, deadline.left, error.retry_after if isinstance(error, Busy) else None)
                if pause is None:
                    raise
                logger.info("%s; trying again", error)
                time.sleep(pause)
    finally:
        shown.close()
        if transfer is not None:
            transfer.close()


def receive_part(
    go: Any,
    metadata: str,
    step: int,
    key: str,
    deadline: Deadline,
    token: str,
    checked: bool,
    memory: Memory,
    abandon: Abandon,
) -> Part:
    """Fetches a part of a state; see `HTTPTransport.recv_part`."""
    what = describe(metadata, step, key)
    abandon.check(what)
    try:
        with ask(metadata, step, key, deadline, token, True, abandon.connected) as answer:
            if answer.control is None:
                raise CheckpointError(f"{what}: the source does not send it by the native core")
            ticket, structure = _frames(answer, what)
            into = memory(structure.tree, sum(structure.sizes))
            if into.numel():
                transfer, shown = Transfer(go, ticket, [into], into, checked, what), Progress(what, logger)
                try:
                    transfer.run(host_port(answer.host, ticket.port), ticket.secret, deadline, shown, abandon)
                finally:
                    shown.close()
                    transfer.close()
            _send_done(answer, deadline)
            return Part(structure.tree, into)
    except CheckpointError:
        abandon.check(what)
        raise


def _frames(answer: Answer, what: str) -> Tuple[Ticket, Structure]:
    """Reads the two frames of the handshake."""
    assert answer.control is not None
    ticket = Ticket.parse(read_frame(answer.control, what), what)
    return ticket, parse_structure(read_frame(answer.control, what), what)


def _native(key: str) -> str:
    """The key by which the native core's sources are asked for what this one names."""
    return key if key == REST else FULL


def _open(
    go: Any,
    answer: Answer,
    transfer: Optional[StateTransfer],
    own: Optional[Callable[[], object]],
    target: Optional[Target],
    checked: bool,
    what: str,
) -> Tuple[StateTransfer, Ticket]:
    """Reads the two frames. A running transfer continues if the source still offers the same bytes."""
    ticket, structure = _frames(answer, what)
    if transfer is not None and transfer.session == ticket.session:
        return transfer, ticket
    if transfer is not None:
        transfer.close()
    return StateTransfer(go, ticket, structure, own() if own is not None else None, target, checked, what), ticket


def _can_fill(device: torch.device) -> bool:
    return device.type == "cpu" or copies_for(device.type) is not None


def _devices(structure: Structure) -> Dict[Path, str]:
    """The source's devices for the tensors that it has on devices."""
    devices: Dict[Path, str] = {}
    for path, node in tensor_nodes(structure.tree, ()) if structure.devices else ():
        region = (node[1] if node[0] == "D" else node)[1]
        if type(region) is int and region in structure.devices:
            devices[path] = structure.devices[region]
    return devices


def _same_kind(what: str, device: str) -> torch.device:
    """The device for a tensor that is received without a target: this process's current device of the same type."""
    if device == "cpu":
        return CPU
    kind = device.partition(":")[0]
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if here is None or here.type != kind:
        raise CheckpointError(f"{what}: the source has tensors on {device}, this process has no device of that kind")
    return torch.device(kind, torch.accelerator.current_device_index())


class UpstreamHomes:
    """Chooses the devices for the storages of a state in the upstream format.

    Args:
        what: names the transfer in errors
        in_host_memory: whether all of them stay in host memory
    """

    def __init__(self, what: str, in_host_memory: bool) -> None:
        self._what = what
        self._in_host_memory = in_host_memory
        self._devices: Dict[int, str] = {}  # by the address of their memory

    def of(self, storage: torch.UntypedStorage, device: str) -> torch.UntypedStorage:
        if device == "cpu":
            return storage
        if self._in_host_memory:
            if storage.nbytes():
                self._devices[storage.data_ptr()] = device
            return storage
        return storage.to(device=_same_kind(self._what, device))

    def devices(self, state: object) -> Dict[Path, str]:
        """The source's devices for the tensors of a received state that it has on devices."""
        if not self._devices:
            return {}
        at = {path: local_part(tensor).untyped_storage() for path, tensor in tensors_by_path(state).items()}
        return {path: self._devices[s.data_ptr()] for path, s in at.items() if s.data_ptr() in self._devices}


def _send_done(answer: Answer, deadline: Deadline) -> None:
    """Reports to the source that the transfer is complete. The end of the connection has the same effect."""
    assert answer.sock is not None
    answer.sock.deadline = deadline.at
    try:
        answer.sock.sendall(DONE)
    except OSError as error:
        logger.debug("the source did not hear that the transfer is done: %s", error)
