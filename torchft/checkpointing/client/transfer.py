"""One transfer into memory, over the native core."""

from __future__ import annotations

from typing import Sequence

import torch

from torchft.checkpointing.client.progress import TransferProgress
from torchft.checkpointing.client.request import Answer, Request
from torchft.checkpointing.codec.handshake import Ticket
from torchft.checkpointing.native.core import ON_DEVICE, FetchStatus, NativeFetch
from torchft.checkpointing.native.staged_receive import StagedReceive, is_staged
from torchft.checkpointing.transport import CheckpointError, Interrupted, Role

_SLICE = 0.5  # seconds between two checks of the progress


class Transfer:
    """A transfer into memory, flat tensors of bytes that `keep` keeps alive. What arrived is kept when a
    connection breaks. `received`: bytes that have arrived; `checked`: whether blocks carry checksums.
    """

    received = 0

    def __init__(
        self, ticket: Ticket, regions: Sequence[torch.Tensor], keep: object, checked: bool, request: Request
    ) -> None:
        self.session = ticket.session
        self._request = request
        self._staged = StagedReceive(regions, ticket.block_size, request.what)
        pairs = [
            (ON_DEVICE if is_staged(region) else region.data_ptr(), region.numel()) for region in regions
        ]
        kept = [keep, self._staged]
        self._fetch = NativeFetch(pairs, kept, ticket.block_size, checked, self._staged.window)
        self._staged.begin(self._fetch)

    def run(self, answer: Answer, ticket: Ticket, progress: TransferProgress) -> FetchStatus:
        """Fetches from a source until everything has arrived. Interrupted: the source failed;
        CheckpointError: the received data is wrong; TimeoutError: the deadline has passed.
        """
        what, deadline = self._request.what, self._request.deadline
        self._fetch.add(answer.data_address(ticket), ticket.secret)
        most = self.received  # blocks that are damaged are not counted any more
        while True:
            left = deadline.left
            if left <= 0:
                raise TimeoutError("timed out")
            self._request.abandon.check(what)
            status = self._fetch.wait(min(_SLICE, left))
            self._staged.take(self._fetch, status.full)
            if status.received > most:
                most = status.received
                deadline.arrived()
            self.received = status.received
            progress.update(status.received, status.total)
            if status.failure:
                raise CheckpointError(f"{what}: {status.failure}")
            if status.done:
                return status
            if not status.running:
                raise Interrupted(f"{what}: {'; '.join(dict.fromkeys(status.failed))}")

    def help(self, answer: Answer, ticket: Ticket) -> None:
        """Adds an additional source, whose state has the same layout."""
        self._fetch.add(answer.data_address(ticket), ticket.secret, Role.ADDITIONAL)

    def close(self) -> None:
        """Ends the transfer. After this call nothing writes to the memory."""
        self._fetch.end()
        self._staged.close()
