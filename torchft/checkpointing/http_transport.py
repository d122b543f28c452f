"""A checkpoint transport over HTTP: the source of a heal serves its state, and the targets fetch it."""

from __future__ import annotations

import json
import logging
import threading
from contextlib import closing
from datetime import timedelta
from typing import Any, Callable, List, Mapping, Optional, Sequence, TypeVar

from torchft._checks import check_positive
from torchft._forked import Maker
from torchft.addresses import heal_hosts
from torchft.checkpointing.client.deadline import Deadline
from torchft.checkpointing.client.receive import Memory, Receiver, receive_part
from torchft.checkpointing.client.request import Abandon, Request
from torchft.checkpointing.client.target import TargetState
from torchft.checkpointing.codec.handshake import Name, read_frame
from torchft.checkpointing.codec.requests import DECISION, FULL, METADATA, REST, StatePart, announce
from torchft.checkpointing.native.core import NativeServer
from torchft.checkpointing.source.checkpoint import Checkpoint
from torchft.checkpointing.source.pacer import Pacer
from torchft.checkpointing.source.publisher import Parts, Publisher
from torchft.checkpointing.source.server import CheckpointServer
from torchft.checkpointing.transport import AdditionalSource, CheckpointTransport, Role, Unsendable
from torchft.utils import device_pci_address

logger: logging.Logger = logging.getLogger(__name__)

T = TypeVar("T")


class HTTPTransport(CheckpointTransport[T]):
    """Serves the state of this replica group to groups that heal from it, and fetches the state of a source
    when this group heals.

    Readers have usually finished before the source changes its state. `disallow_checkpoint` waits for those
    that still take data, at most `timeout`, and then closes their connections.

    Between two transports of this class the native core moves the tensors' memory, in blocks with checksums,
    on several connections at once. If its connections break, a retry fetches only the rest. State on a GPU
    goes through page-locked blocks of host memory on both ends. With an upstream peer, and for state on a GPU
    that does not fit into half of the free memory of the source's host, PyTorch's streaming format over HTTP
    is used.

    The received state consists of tensors, plain values and containers; other types are read by PyTorch's
    restricted unpickler, and need `torch.serialization.add_safe_globals`. If TORCHFT_TOKEN_FILE names a file,
    its content is a token, and only targets that prove knowledge of it can fetch a checkpoint.

    Args:
        timeout: limit for each wait at the source: for a checkpoint that a peer requests, for readers in
            `disallow_checkpoint`, for a peer that takes no data.
        num_chunks: for upstream peers: 0 sends the state in one stream, n in n streams at once. Must be the
            same in every replica group.
        checksum: whether received data is verified by checksums
        bandwidth_limit: bytes per second for all targets together; 0: no limit. The native core's data
            connections have this limit, and, separately, PyTorch's streaming format, which cannot be resumed:
            it must be transferred within the timeout.
        background: whether this source serves with the lowest priority on its host. By default only
            additional sources do so, because the whole job waits for the assigned source. Set it where
            sources continue to train while a group heals, as with LocalSGD and DiLoCo: their steps stay fast,
            and the heal uses the remaining processor time.
        hosts: the addresses of this host to announce, the best one first. A target uses the first one that
            answers, an upstream target only the first one. Default: `torchft.addresses.heal_hosts`

    Raises:
        ValueError: a timeout that is not positive, a negative number of chunks or bandwidth
    """

    several_sources = True
    gives_parts = True
    takes_target = True

    def __init__(
        self,
        timeout: timedelta,
        num_chunks: int,
        *,
        checksum: bool = True,
        bandwidth_limit: int = 0,
        background: bool = False,
        hosts: Optional[Sequence[str]] = None,
    ) -> None:
        check_positive("timeout", timeout)
        if num_chunks < 0:
            raise ValueError(f"num_chunks is {num_chunks}: allowed are 0 (one stream) and more")
        if bandwidth_limit < 0:
            raise ValueError(
                f"bandwidth_limit is {bandwidth_limit}: allowed are bytes a second, and 0 for no limit"
            )
        if not hosts:
            heal_hosts()  # so that a bad setting raises here, and not in the first heal
        self._maker = Maker(type(self).__name__)
        self._timeout = timeout.total_seconds()
        self._checksum = checksum
        self._num_chunks = num_chunks
        self._source = Publisher(keep=self._timeout)
        self._native = NativeServer(self._timeout, bandwidth_limit, background)
        self._server = CheckpointServer(self._source, self._native, Pacer(bandwidth_limit), self._timeout)
        self._names: Callable[[], Mapping[int, Name]] = dict
        self._receiving: Optional[Abandon] = None
        self._hosts = list(hosts or [])
        self._address = ""
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), daemon=True, name="torchft-checkpoint-server"
        )
        self._thread.start()

    def address(self) -> str:
        """The address of this server for peers: `http://{host}:{port}/checkpoint/`."""
        if not self._address:
            # Determined at the first use: the default host is the one on the route to the lighthouse, and a
            # Manager that is created after this transport may set the lighthouse's address.
            self._address = announce(
                self._hosts or heal_hosts(device_pci_address()), self._server.server_port
            )
        return self._address

    def metadata(self) -> str:
        return self.address()

    def send_checkpoint(self, dst_ranks: List[int], step: int, state_dict: T, timeout: timedelta) -> None:
        self._maker.check()
        try:
            checkpoint = Checkpoint(state_dict, self._num_chunks, self._names())
        except Unsendable as error:
            self._source.refuse(step, str(error))
            raise
        self._source.publish(step, checkpoint, Role.ASSIGNED)

    def refuse_checkpoint(self, dst_ranks: List[int], step: int, reason: str, timeout: timedelta) -> None:
        self._source.refuse(step, reason)

    def help_checkpoint(self, step: int, state_dict: T) -> None:
        self._maker.check()
        checkpoint = Checkpoint(state_dict, self._num_chunks, self._names())
        self._source.publish(step, checkpoint, Role.ADDITIONAL)

    def allow_checkpoint(self, step: int) -> None:
        """Offers the state of the last `send_checkpoint` again, as the state of `step`.

        Raises:
            RuntimeError: there is no such state
        """
        self._maker.check()
        self._source.allow(step)

    def prepare_parts(self, names: Callable[[], Mapping[int, Name]]) -> None:
        """Sets the function that returns the names of the storages that targets can receive in parts, by
        address. A target that has them requests a state without them.
        """
        self._names = names

    def offer_parts(self, step: int, parts: Parts) -> None:
        """Serves parts of the state of a step, or the whole state to a target that requests it, until
        `note_decision` or `disallow_checkpoint`.
        """
        self._source.open(step, parts)

    def refuse_parts(self, step: int, reason: str) -> None:
        """Answers requests for parts of a step with this reason."""
        self._source.refuse_parts(step, reason)

    def note_decision(self, step: int, quorum_id: int, decision: Any) -> None:
        """Records the decision on an attempt at a step, a JSON value, for targets that request it."""
        self._source.decide(step, quorum_id, decision)

    def recv_part(
        self, metadata: str, step: int, key: str, timeout: timedelta, memory: Memory, abandon: Abandon
    ) -> StatePart:
        """Receives a part of a state.

        Args:
            metadata: the result of the source's `metadata`
            step: the step of the part
            key: names the part
            timeout: limit for a time without any data
            memory: called with the part's value, and its number of bytes, before these arrive; returns host
                memory for them
            abandon: aborts the transfer

        Raises:
            RequestRefused: the source has no such part, or has decided on the step
            CheckpointError, CheckpointTimeout: see `CheckpointTransport.recv_checkpoint`
        """
        deadline = Deadline(timeout.total_seconds(), of_progress=True)
        return receive_part(Request(metadata, step, key, deadline, abandon), self._checksum, memory)

    def recv_decision(
        self, metadata: str, step: int, quorum_id: int, timeout: timedelta, abandon: Abandon
    ) -> Any:
        """The source's decision on an attempt at a step; None: it does not know.

        Raises:
            CheckpointError, CheckpointTimeout: it did not answer
        """
        request = Request(
            metadata, step, f"{DECISION}{quorum_id}", Deadline(timeout.total_seconds()), abandon
        )
        with request.ask() as answer:
            assert answer.body is not None
            return json.loads(read_frame(answer.body, request.what))

    def disallow_checkpoint(self) -> None:
        self._maker.check()
        self._source.disallow(self._timeout)

    def recv_checkpoint(
        self,
        src_rank: int,
        metadata: str,
        step: int,
        timeout: timedelta,
        additional_sources: Sequence[AdditionalSource] = (),
        target: Optional[TargetState] = None,
    ) -> T:
        """See `CheckpointTransport.recv_checkpoint`.

        Args:
            additional_sources: functions that return the metadata of further groups that offer this step.
                Blocks that equal those of the source may come from them.
            target: chooses the memory of tensors. Without it, a tensor that is on a device at the source is
                received on this process's current device of that type. Also says whether the timeout is one
                of progress, `TargetState.waited_for`.
        """
        waited_for = target is not None and target.waited_for
        deadline = Deadline(timeout.total_seconds(), waited_for)
        key = REST if target is not None and target.has else FULL if self._num_chunks == 0 else METADATA
        self._receiving = Abandon()
        request = Request(metadata, step, key, deadline, self._receiving)
        try:
            with closing(
                Receiver(request, target, self._checksum, self._num_chunks, additional_sources)
            ) as receiver:
                return receiver.receive()
        finally:
            self._receiving = None

    def abandon_receiving(self, reason: Exception) -> None:
        """Aborts a `recv_checkpoint` on another thread: it raises CheckpointError with this reason."""
        receiving = self._receiving  # read once: the other thread clears it when its transfer ends
        if receiving is not None:
            receiving.because(reason)

    def shutdown(self, wait: bool = True) -> None:
        self._maker.check()
        # First end the waits of the request threads, so that `server_close` need not wait for them. A request
        # that arrives later is refused at once, because the source remains closed.
        limit = self._timeout if wait else 0.0
        self._source.close(limit)
        self._native.end()
        self._server.shutdown()
        self._server.close_timeout = limit
        self._server.server_close()
        if wait:
            self._thread.join(self._timeout)
