"""The HTTP server of a source: it answers requests for states, and hands targets over to the native core."""

from __future__ import annotations

import json
import logging
import secrets
import socket
import time
from contextlib import closing
from http import HTTPStatus
from typing import Optional

from torchft.checkpointing.codec.handshake import PROTOCOL, StateRegion, Ticket, frame, pack_structure
from torchft.checkpointing.codec.requests import (
    DECISION,
    FULL,
    METADATA,
    PART,
    PREFIX,
    REST,
    StatePart,
    is_number,
    parse,
)
from torchft.checkpointing.codec.token import accepts
from torchft.checkpointing.native import core
from torchft.checkpointing.source.offer import Offer
from torchft.checkpointing.source.pacer import Pacer
from torchft.checkpointing.source.publisher import NoParts, Publisher, Unavailable, WrongStep
from torchft.http import _IPv6HTTPServer, _RequestHandler

logger: logging.Logger = logging.getLogger(__name__)

# Seconds for a peer to write its request, also the next one on the same connection.
_REQUEST_TIMEOUT = 30.0


class CheckpointServer(_IPv6HTTPServer):
    def __init__(
        self,
        source: Publisher,
        native: core.NativeServer,
        pacer: Pacer,
        wait_timeout: float,
    ) -> None:
        super().__init__(("", 0), _Handler)
        self.pacer = pacer
        self.source = source
        self.native = native
        self.wait_timeout = wait_timeout

    # Called by `serve_forever` in each of its intervals.
    def service_actions(self) -> None:
        self.source.drop_old(time.monotonic())


class _Handler(_RequestHandler):
    server: CheckpointServer  # type: ignore[assignment]

    def handle_one_request(self) -> None:
        self.connection.deadline = time.monotonic() + _REQUEST_TIMEOUT
        super().handle_one_request()

    def do_GET(self) -> None:
        request = parse(self.path)
        if request is None:
            self._refuse(
                HTTPStatus.NOT_FOUND, f"no such path: {self.path[:200]}; known: {PREFIX}{{step}}/{{part}}"
            )
            return
        if not accepts((self.headers.get("Authorization") or "").removeprefix("Bearer ")):
            self._refuse(
                HTTPStatus.UNAUTHORIZED, "a request for a checkpoint must prove that it knows the job's token"
            )
            return
        # Only after the token was checked: requests without it must not use up `max_connections`.
        if not self.server.admit(self.connection):
            self.close_connection = True
            return
        step, key = request
        try:
            if key.startswith(PART):
                self._give(self.server.source.part(step, key, self.server.wait_timeout))
            elif key.startswith(DECISION):
                quorum_id = key.removeprefix(DECISION)
                if not is_number(quorum_id):
                    raise NoParts(f"{quorum_id[:50]!r} is no id of a quorum")
                decision = self.server.source.decision(step, int(quorum_id), self.server.wait_timeout)
                self._send(HTTPStatus.OK, frame(json.dumps(decision).encode()), "application/octet-stream")
            else:
                with self.server.source.reading(step, self.server.wait_timeout) as offer:
                    self._serve(offer, key)
        except WrongStep as error:
            self._refuse(HTTPStatus.BAD_REQUEST, str(error))
        except NoParts as error:
            self._refuse(HTTPStatus.NOT_FOUND, str(error))
        except Unavailable as error:
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, str(error))

    def _give(self, part: StatePart) -> None:
        server = self.server.native
        if self.headers.get("Upgrade") != PROTOCOL or not server.start():
            self._refuse(HTTPStatus.NOT_FOUND, "parts of a state are sent by the native core only")
            return
        self._extend_deadline()
        native = server.offer([(part.memory.data_ptr(), part.memory.numel())], part)
        with closing(native), closing(native.grant()) as grant:
            structure = pack_structure([StateRegion(part.memory.numel())], json.dumps(part.value).encode())
            self._hand_over(native, grant, secrets.token_hex(8), structure)

    def _serve(self, offer: Offer, key: str) -> None:
        checkpoint, rest = offer.checkpoint, key == REST
        whole = key in (FULL, METADATA, REST) and self.server.native.start()
        native = offer.native(self.server.native, rest) if whole else None
        if native is not None and self.headers.get("Upgrade") == PROTOCOL:
            self._extend_deadline()
            offer.want()
            with offer.granted(native) as grant:
                self._hand_over(native, grant, offer.session, checkpoint.structure_frame(rest))
            return
        stream = checkpoint.stream(key)
        if stream is None:
            self._refuse(
                HTTPStatus.NOT_FOUND,
                f"no part {key[:50]!r} here: this source has num_chunks={checkpoint.num_chunks}",
            )
            return
        self._extend_deadline()
        self.send_response(HTTPStatus.OK)
        if native is not None:
            # If the target has requested the native protocol, its request was garbled on the way. This header
            # lets the target detect that and retry.
            self.send_header("Upgrade", PROTOCOL)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(stream.nbytes))
        self.end_headers()
        # An error after this point closes the connection. The peer detects it, because the body is shorter
        # than its Content-Length; on a connection that stays open, it would read the next answer as the rest
        # of the body.
        closes = self.close_connection  # True if the client asked for it, also by HTTP/1.0
        self.close_connection = True
        with closing(offer.read(stream, self.connection.abort, self.server.pacer)) as pieces:
            for piece in pieces:
                self._extend_deadline()
                self.connection.sendall(piece)
        self.close_connection = closes

    def _hand_over(self, native: core.NativeOffer, grant: core.Grant, session: str, structure: bytes) -> None:
        """Lets the native core serve this target to the end."""
        self.close_connection = True  # after the upgrade it carries no further HTTP requests
        # Else the kernel holds back the frames until the peer acknowledges the headers, perhaps for 40 ms.
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.send_response(HTTPStatus.SWITCHING_PROTOCOLS)
        self.send_header("Connection", "Upgrade")
        self.send_header("Upgrade", PROTOCOL)
        self.end_headers()
        ticket = Ticket(native.server.port, grant.secret, session, native.block_size)
        self.connection.sendall(ticket.frame() + structure)
        self._await_end(grant)

    def _await_end(self, grant: core.Grant) -> None:
        """Waits until the target closes its connection, or has received no data for `wait_timeout`."""
        served = -1
        while True:
            self._extend_deadline()
            try:
                # Not through rfile, which cannot be read again after a timeout.
                self.connection.recv_into(bytearray(1))
                return
            except TimeoutError:
                before, served = served, grant.served
                if served == before:
                    return

    def _extend_deadline(self) -> None:
        self.connection.deadline = time.monotonic() + self.server.wait_timeout

    def _refuse(self, status: HTTPStatus, reason: str) -> None:
        # In the status line, too, because upstream peers read the reason there. A line break would end it.
        phrase = " ".join(reason.split()).encode("latin-1", "replace").decode("latin-1")
        self._send(status, reason.encode(), "text/plain; charset=utf-8", phrase)

    def _send(self, status: HTTPStatus, body: bytes, kind: str, phrase: Optional[str] = None) -> None:
        self._extend_deadline()
        self.send_response(status, phrase)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
