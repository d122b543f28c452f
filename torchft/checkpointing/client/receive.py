"""A target receives a state: asks a source, chooses the format, and asks again when a connection breaks."""

from __future__ import annotations

import logging
import time
from contextlib import closing
from functools import partial
from typing import Any, Callable, Optional, Sequence

import torch

from torchft.checkpointing.client.places import Destination, device_like
from torchft.checkpointing.client.progress import TransferProgress
from torchft.checkpointing.client.request import Answer, Busy, Request
from torchft.checkpointing.client.retry import Attempts
from torchft.checkpointing.client.sources import AdditionalSources
from torchft.checkpointing.client.target import TargetState
from torchft.checkpointing.client.transfer import Transfer
from torchft.checkpointing.client.upstream import receive_upstream
from torchft.checkpointing.codec.requests import StatePart
from torchft.checkpointing.native import core
from torchft.checkpointing.transport import AdditionalSource, CheckpointError, Interrupted

logger: logging.Logger = logging.getLogger(__name__)

# Given a part's value and bytes, returns host memory as a flat tensor.
Memory = Callable[[Any, int], torch.Tensor]


class Receiver:
    """Receives one state: in the native format if both sides support it, else in the upstream format, in
    `num_chunks` streams (0: one). `checked`: whether blocks carry checksums.
    """

    def __init__(
        self,
        request: Request,
        target: Optional[TargetState],
        checked: bool,
        num_chunks: int,
        additional_sources: Sequence[AdditionalSource],
    ) -> None:
        self._request = request
        self._target = target
        self._checked = checked
        self._num_chunks = num_chunks
        self._additional = additional_sources if checked else ()
        self._destination: Optional[Destination] = None
        self._transfer: Optional[Transfer] = None

    def receive(self) -> Any:
        """Returns the state; errors are those of `CheckpointTransport.recv_checkpoint`."""
        request, attempts = self._request, Attempts()
        progress = TransferProgress(request.what, logger)
        while True:
            request.abandon.check(request.what)
            before = self._received
            try:
                with request.ask(upgrade=core.native() is not None) as answer:
                    if answer.control is None:
                        return receive_upstream(request, answer, self._num_chunks, self._target)
                    destination = self._fetch(answer, progress)
                return destination.state()
            except CheckpointError as error:
                request.abandon.check(request.what)
                if not isinstance(error, Interrupted):
                    raise
                retry_after = error.retry_after if isinstance(error, Busy) else None
                pause = attempts.failed(self._received > before, request.deadline.left, retry_after)
                if pause is None:
                    raise
                logger.info("%s; trying again", error)
                time.sleep(pause)

    @property
    def _received(self) -> int:
        return self._transfer.received if self._transfer else 0

    def _fetch(self, answer: Answer, progress: TransferProgress) -> Destination:
        """Fills memory with the state. A broken transfer continues if the source offers the same bytes."""
        ticket, structure = answer.handshake(self._request.what)
        if self._transfer is None or self._transfer.session != ticket.session:
            self.close()
            home = partial(device_like, self._request.what)
            to = self._destination = Destination(structure, self._target, self._request.what, home)
            self._transfer = Transfer(ticket, to.regions, to, self._checked, self._request)
        assert self._destination is not None
        with AdditionalSources(self._transfer, structure.regions, self._additional, self._request):
            status = self._transfer.run(answer, ticket, progress)
        progress.done(status.digest)
        self._transfer.close()
        return self._destination

    def close(self) -> None:
        for part in (self._transfer, self._destination):
            if part is not None:
                part.close()


def receive_part(request: Request, checked: bool, memory: Memory) -> StatePart:
    """Fetches a part of a state; see `HTTPTransport.recv_part`."""
    what = request.what
    request.abandon.check(what)
    try:
        with request.ask(upgrade=True) as answer:
            if answer.control is None:
                raise CheckpointError(f"{what}: the source does not send it by the native core")
            ticket, structure = answer.handshake(what)
            into = memory(structure.tree, structure.nbytes)
            if into.numel():
                transfer = Transfer(ticket, [into], into, checked, request)
                with closing(transfer):
                    transfer.run(answer, ticket, TransferProgress(what, logger))
            return StatePart(structure.tree, into)
    except CheckpointError:
        request.abandon.check(what)
        raise
