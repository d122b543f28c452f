"""The target's side of a transfer: chooses the format, runs the native data plane, and handles broken connections."""

from __future__ import annotations

import logging
import time
from typing import Any, Callable, Optional, Sequence, Tuple

import torch

from torchft.addresses import host_port
from torchft.checkpointing.client.deadline import Deadline
from torchft.checkpointing.client.progress import TransferProgress, summary
from torchft.checkpointing.client.request import Abandon, Answer, Busy, ask, describe, frames
from torchft.checkpointing.client.retry import Attempts
from torchft.checkpointing.client.sources import AdditionalSources
from torchft.checkpointing.client.target import TargetState
from torchft.checkpointing.client.transfer import StateTransfer, Transfer
from torchft.checkpointing.codec.handshake import DONE, Ticket
from torchft.checkpointing.codec.requests import FULL, REST, StatePart
from torchft.checkpointing.transport import AdditionalSource, CheckpointError, Interrupted

logger: logging.Logger = logging.getLogger(__name__)

Memory = Callable[[Any, int], torch.Tensor]  # given a part's value and bytes, returns host memory as a flat tensor


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
    target: Optional[TargetState] = None,
    upstream: Callable[[Answer], Any],
    additional_sources: Sequence[AdditionalSource] = (),
    abandon: Optional[Abandon] = None,
) -> Any:
    """Fetches a state: in the native format if both sides support it, else in the upstream format.

    Args:
        go: the native library; None if it cannot be used
        metadata, step, key, token: see `request.ask`
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
    shown = TransferProgress(what, logger)
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
) -> StatePart:
    """Fetches a part of a state; see `HTTPTransport.recv_part`."""
    what = describe(metadata, step, key)
    abandon.check(what)
    try:
        with ask(metadata, step, key, deadline, token, True, abandon.connected) as answer:
            if answer.control is None:
                raise CheckpointError(f"{what}: the source does not send it by the native core")
            ticket, structure = frames(answer, what)
            into = memory(structure.tree, sum(structure.sizes))
            if into.numel():
                transfer, shown = Transfer(go, ticket, [into], into, checked, what), TransferProgress(what, logger)
                try:
                    transfer.run(host_port(answer.host, ticket.port), ticket.secret, deadline, shown, abandon)
                finally:
                    shown.close()
                    transfer.close()
            _send_done(answer, deadline)
            return StatePart(structure.tree, into)
    except CheckpointError:
        abandon.check(what)
        raise


def _native(key: str) -> str:
    """The key by which the native core's sources are asked for what this one names."""
    return key if key == REST else FULL


def _open(
    go: Any,
    answer: Answer,
    transfer: Optional[StateTransfer],
    own: Optional[Callable[[], object]],
    target: Optional[TargetState],
    checked: bool,
    what: str,
) -> Tuple[StateTransfer, Ticket]:
    """Reads the two frames. A running transfer continues if the source still offers the same bytes."""
    ticket, structure = frames(answer, what)
    if transfer is not None and transfer.session == ticket.session:
        return transfer, ticket
    if transfer is not None:
        transfer.close()
    return StateTransfer(go, ticket, structure, own() if own is not None else None, target, checked, what), ticket


def _send_done(answer: Answer, deadline: Deadline) -> None:
    """Reports to the source that the transfer is complete. The end of the connection has the same effect."""
    assert answer.sock is not None
    answer.sock.deadline = deadline.at
    try:
        answer.sock.sendall(DONE)
    except OSError as error:
        logger.debug("the source did not hear that the transfer is done: %s", error)
