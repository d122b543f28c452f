"""The target's side of a transfer: which format, the native data plane, and what follows a broken connection."""

from __future__ import annotations

import logging
import threading
import time
from functools import partial
from typing import Any, Callable, Dict, List, Optional, Sequence, Set, Tuple

import torch

from torchft.addresses import host_port
from torchft.checkpointing._encoding import Path, decode, flat_storage
from torchft.checkpointing._handshake import DONE, Structure, Ticket, parse_structure, read_frame
from torchft.checkpointing._http_client import Answer, ask, describe
from torchft.checkpointing._landing import Landing, is_staged
from torchft.checkpointing._memory import HostMemory, check_room
from torchft.checkpointing._native_transfer import ON_DEVICE, Fetch, Status
from torchft.checkpointing._places import Places, local_part, tensor_nodes, tensors_by_path
from torchft.checkpointing._progress import Progress, summary
from torchft.checkpointing._retry import Attempts
from torchft.checkpointing._staging import copies_for
from torchft.checkpointing._target import CPU, Homes, Target
from torchft.checkpointing._upstream import FULL
from torchft.checkpointing.transport import AdditionalSource, CheckpointError, Interrupted, Role
from torchft.http import _DeadlineSocket

logger: logging.Logger = logging.getLogger(__name__)

_SLICE = 0.5  # seconds between two looks at the progress
_HELP_AFTER = 0.1  # seconds; what takes less is not worth the questions to further sources
_SOURCE_CONNECT = 3.0  # seconds in which a further source must answer
_SOURCE_END = 1.0  # seconds for a thread that talks to a further source, when its connection was cut


class SourceFailed(Interrupted):
    """The source went away during the transfer; it may come back."""


class Abandon:
    """Ends a transfer from another thread: a source that has failed may be silent, with its connections open."""

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
        """Raises CheckpointError if the transfer is to end."""
        if self._reason is not None:
            raise CheckpointError(f"{what}: {self._reason}") from self._reason


class Transfer:
    """One state on its way here. What has arrived stays when a connection is lost.

    Args:
        go: the native library
        ticket, said: what the source said
        own: the state that is here already, to be filled in place and to be like the one that comes
        target: where tensors go otherwise
        checked: whether blocks carry checksums
        what: names the transfer in errors
    """

    def __init__(
        self,
        go: Any,
        ticket: Ticket,
        said: Structure,
        own: Optional[object],
        target: Optional[Target],
        checked: bool,
        what: str,
    ) -> None:
        self.session = ticket.session
        self._tree = said.tree
        self._sizes = said.sizes
        self._what = what
        mine: Dict[Path, torch.Tensor] = {}
        if own is not None:
            mine = tensors_by_path(own)
        elif target is not None and target.writable:
            mine = target.own()
        devices = _devices(said)
        self._places = Places(said.tree, said.sizes, mine, what, _can_fill, strict=own is not None)
        if target is not None and own is None and not target.writable:
            target.devices = devices
            check_room(sum(said.sizes[i] for i in said.devices if i < len(said.sizes)), what)
        # Of a state that may not be written to no tensor is known, so that everything goes to memory of the host.
        home = partial(_same_kind, what) if own is None and target is None else Homes(mine, devices).of
        memory = HostMemory()
        self._flats = [
            flat_storage(0 if self._places.has(i) else size, what, self._home(i, said, home), memory)
            for i, size in enumerate(said.sizes)
        ]
        regions = [self._places.region(i) if self._places.has(i) else flat for i, flat in enumerate(self._flats)]
        self._landing = Landing(regions, ticket.block_size, what)
        pairs = [(ON_DEVICE if is_staged(region) else region.data_ptr(), region.numel()) for region in regions]
        keep = [self._flats, self._places, self._landing]
        self._fetch = Fetch(go, pairs, keep, ticket.block_size, checked, stall=10.0, window=self._landing.window)
        self._landing.begin(self._fetch)
        self.received = 0
        self.total = sum(said.sizes)

    def _home(self, region: int, said: Structure, home: Callable[[str], torch.device]) -> torch.device:
        """Where a region is to be that goes to no tensor that is here."""
        staged = self._places.has(region) or region in self._places.copied
        return CPU if staged else home(said.devices.get(region, "cpu"))

    def run(self, address: str, secret: str, deadline: float, progress: Progress, abandon: Abandon) -> Status:
        """Fetches from a source until everything is here.

        Raises:
            SourceFailed: the source went away
            CheckpointError: what arrived is wrong
            TimeoutError: the deadline has passed
        """
        self._fetch.add(address, secret)
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("timed out")
            abandon.check(self._what)
            status = self._fetch.wait(min(_SLICE, left))
            self._landing.take(self._fetch, status.full)
            self.received = status.received
            progress.update(status.received, status.total)
            if status.failure:
                raise CheckpointError(f"{self._what}: {status.failure}")
            if status.done:
                return status
            if not status.running:
                raise SourceFailed(f"{self._what}: {'; '.join(dict.fromkeys(status.failed))}")

    def help(self, address: str, secret: str, sizes: List[int]) -> bool:
        """Lets another source help; False if it has a state of another kind."""
        if sizes != self._sizes:
            return False
        self._fetch.add(address, secret, Role.ADDITIONAL)
        return True

    def state(self) -> Any:
        """The state, once everything is here."""
        self.close()
        return decode(self._tree, self._flats, self._what, self._places.fill(self._flats))

    def close(self) -> None:
        """From its return on, nobody writes to the state's memory."""
        self._fetch.end()
        self._landing.close()


class AdditionalSources:
    """Further sources of a transfer, each asked by a thread of its own, for as long as the block lasts.

    None of them is needed: what goes wrong with one is logged, and the others go on.
    """

    def __init__(
        self, transfer: Transfer, additional_sources: Sequence[AdditionalSource], step: int, deadline: float, token: str
    ) -> None:
        self._transfer = transfer
        self._step = step
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
        # Those that have no connection yet end by themselves, and do nothing more: nobody waits for a failed group.
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
            what = describe(metadata, self._step, FULL)
            # it answers at once, or is of no use
            deadline = min(self._deadline, time.monotonic() + _SOURCE_CONNECT)
            with ask(metadata, self._step, FULL, deadline, self._token, True, self._connected) as answer:
                if answer.control is None or answer.sock is None:
                    return
                ticket = Ticket.parse(read_frame(answer.control, what), what)
                sizes = parse_structure(read_frame(answer.control, what), what).sizes
                if self._over.is_set():
                    return
                if not self._transfer.help(host_port(answer.host, ticket.port), ticket.secret, sizes):
                    logger.info("%s: its state has another structure than the assigned source's", what)
                    return
                self._over.wait(max(0.0, self._deadline - time.monotonic()))
        except Exception as error:
            if not self._over.is_set():
                logger.info("a further source does not help: %s", error)


def receive(
    go: Any,
    metadata: str,
    step: int,
    key: str,
    deadline: float,
    *,
    token: str = "",
    checked: bool = True,
    own: Optional[Callable[[], object]] = None,
    target: Optional[Target] = None,
    upstream: Callable[[Answer], Any],
    additional_sources: Sequence[AdditionalSource] = (),
    abandon: Optional[Abandon] = None,
) -> Any:
    """Fetches a state, in the native format where both sides can, else in the upstream format.

    Args:
        go: the native library; None where it cannot be used
        metadata, step, key, token: see `_http_client.ask`
        deadline: by time.monotonic()
        checked: whether blocks carry checksums
        own: gives the state that is here already, to be filled in place and to be like the one that comes
        target: where tensors go otherwise
        upstream: reads an answer in the upstream format
        additional_sources: give the metadata of further sources
        abandon: may end it before the deadline

    Raises:
        CheckpointError, TimeoutError: see `CheckpointTransport.recv_checkpoint`
    """
    what = describe(metadata, step, key)
    shown = Progress(what, logger)
    transfer: Optional[Transfer] = None
    attempts, start = Attempts(deadline), time.monotonic()
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
                    with AdditionalSources(transfer, additional_sources if checked else (), step, deadline, token):
                        status = transfer.run(
                            host_port(answer.host, ticket.port), ticket.secret, deadline, shown, abandon
                        )
                    _say_done(answer)
                logger.info("%s: %s, digest %s", what, summary(status.total, time.monotonic() - start), status.digest)
                return transfer.state()
            except CheckpointError as error:
                abandon.check(what)
                if not isinstance(error, Interrupted):
                    raise
                progress = transfer is not None and transfer.received > before
                pause = attempts.failed(progress, time.monotonic())
                if pause is None:
                    raise
                logger.info("%s; trying again", error)
                time.sleep(pause)
    finally:
        shown.close()
        if transfer is not None:
            transfer.close()


def _open(
    go: Any,
    answer: Answer,
    transfer: Optional[Transfer],
    own: Optional[Callable[[], object]],
    target: Optional[Target],
    checked: bool,
    what: str,
) -> Tuple[Transfer, Ticket]:
    """Reads the two frames. A transfer goes on if the source offers the same bytes still."""
    assert answer.control is not None
    ticket = Ticket.parse(read_frame(answer.control, what), what)
    said = parse_structure(read_frame(answer.control, what), what)
    if transfer is not None and transfer.session == ticket.session:
        return transfer, ticket
    if transfer is not None:
        transfer.close()
    return Transfer(go, ticket, said, own() if own is not None else None, target, checked, what), ticket


def _can_fill(device: torch.device) -> bool:
    return device.type == "cpu" or copies_for(device.type) is not None


def _devices(said: Structure) -> Dict[Path, str]:
    """Where the source has its tensors, of those that it has on a device."""
    devices: Dict[Path, str] = {}
    for path, node in tensor_nodes(said.tree, ()) if said.devices else ():
        region = (node[1] if node[0] == "D" else node)[1]
        if type(region) is int and region in said.devices:
            devices[path] = said.devices[region]
    return devices


def _same_kind(what: str, device: str) -> torch.device:
    """Where a tensor goes of a state that is received without a target: to this process's own device of the kind."""
    if device == "cpu":
        return CPU
    kind = device.partition(":")[0]
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if here is None or here.type != kind:
        raise CheckpointError(f"{what}: the source has tensors on {device}, this process has no device of that kind")
    return torch.device(kind, torch.accelerator.current_device_index())


class UpstreamHomes:
    """Where the storages of a state in the upstream format go.

    Args:
        what: names the transfer in errors
        in_host_memory: whether all of them stay there
    """

    def __init__(self, what: str, in_host_memory: bool) -> None:
        self._what = what
        self._in_host_memory = in_host_memory
        self._devices: Dict[int, str] = {}  # by address

    def of(self, storage: torch.UntypedStorage, device: str) -> torch.UntypedStorage:
        if device == "cpu":
            return storage
        if self._in_host_memory:
            if storage.nbytes():
                self._devices[storage.data_ptr()] = device
            return storage
        return storage.to(device=_same_kind(self._what, device))

    def devices(self, state: object) -> Dict[Path, str]:
        """Where the source has the tensors of a state that was received, of those that it has on a device."""
        if not self._devices:
            return {}
        at = {path: local_part(tensor).untyped_storage() for path, tensor in tensors_by_path(state).items()}
        return {path: self._devices[s.data_ptr()] for path, s in at.items() if s.data_ptr() in self._devices}


def _say_done(answer: Answer) -> None:
    """Lets the source forget the state. The end of the connection has the same effect."""
    assert answer.sock is not None
    try:
        answer.sock.sendall(DONE)
    except OSError as error:
        logger.debug("the source did not hear that the transfer is done: %s", error)
