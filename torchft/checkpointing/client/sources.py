"""Additional sources of a transfer."""

from __future__ import annotations

import logging
import threading
from typing import List, Optional, Sequence, Set

from torchft.addresses import host_port
from torchft.checkpointing.client.deadline import Deadline
from torchft.checkpointing.client.request import ask, describe, frames
from torchft.checkpointing.client.transfer import StateTransfer
from torchft.checkpointing.transport import AdditionalSource
from torchft.http import _DeadlineSocket

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
                ticket, structure = frames(answer, what)
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
