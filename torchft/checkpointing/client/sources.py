"""Additional sources of a transfer."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from typing import List, Sequence

from torchft.checkpointing.client.deadline import Deadline
from torchft.checkpointing.client.request import Abandon, Request
from torchft.checkpointing.client.transfer import Transfer
from torchft.checkpointing.codec.handshake import StateRegion
from torchft.checkpointing.transport import AdditionalSource, CheckpointError

logger: logging.Logger = logging.getLogger(__name__)

_HELP_AFTER = 0.1  # seconds; for a shorter transfer additional sources are not worth asking
_SOURCE_CONNECT = 3.0  # seconds within which an additional source must answer
_SOURCE_END = 1.0  # seconds for a thread of an additional source to end, after its connection was cut


class AdditionalSources:
    """Additional sources of a transfer. A separate thread fetches from each of them until the block ends.

    None of them is required: an error of one is logged, and the transfer continues with the others.
    """

    def __init__(
        self,
        transfer: Transfer,
        regions: List[StateRegion],
        additional_sources: Sequence[AdditionalSource],
        request: Request,
    ) -> None:
        self._transfer = transfer
        self._sizes = [region.nbytes for region in regions]
        self._request = request
        self._over = threading.Event()
        self._abandons = [Abandon() for _ in additional_sources]
        self._threads = [
            threading.Thread(target=self._ask, args=one, daemon=True, name="torchft-source")
            for one in zip(self._abandons, additional_sources)
        ]

    def __enter__(self) -> AdditionalSources:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for abandon in self._abandons:
            abandon.because(CheckpointError("the transfer has ended"))
        # Threads without a connection end by themselves and do nothing more; they are not waited for, because
        # the group that they ask may have failed.
        for thread, abandon in zip(self._threads, self._abandons):
            if abandon.reached:
                thread.join(_SOURCE_END)

    def _ask(self, abandon: Abandon, locate: AdditionalSource) -> None:
        if self._over.wait(_HELP_AFTER):
            return
        try:
            metadata, deadline = locate(), self._request.deadline
            if self._over.is_set():
                return
            # a source that does not answer at once is useless
            soon = Deadline(min(deadline.left, _SOURCE_CONNECT))
            request = replace(self._request, metadata=metadata, deadline=soon, abandon=abandon)
            with request.ask(upgrade=True) as answer:
                if answer.control is None:
                    return
                ticket, structure = answer.handshake(request.what)
                if self._over.is_set():
                    return
                if [region.nbytes for region in structure.regions] != self._sizes:
                    logger.info(
                        "%s: its state has another structure than the assigned source's", request.what
                    )
                    return
                self._transfer.help(answer, ticket)
                while (left := deadline.left) > 0 and not self._over.wait(left):
                    pass  # data that has arrived meanwhile has moved the deadline
        except Exception as error:
            if not self._over.is_set():
                logger.info("an additional source failed: %s", error)
