"""Asking a lighthouse over HTTP."""

from __future__ import annotations

import json
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, urlsplit

LIGHTHOUSE_ENV = "TORCHFT_LIGHTHOUSE"
_TIMEOUT_SEC = 5.0
_DEFAULT_PORT = 29510


class Unanswered(Exception):
    """The lighthouse did not do what it was asked for; the text says what was tried."""


class Lighthouse:
    """A lighthouse at ``http://host:port``, or the first of a list of them that answers.

    Raises:
        Unanswered: no address is given, or one that is none.
    """

    def __init__(self, addresses: str | None) -> None:
        text = addresses or os.environ.get(LIGHTHOUSE_ENV) or f"http://localhost:{_DEFAULT_PORT}"
        self.addresses = [_checked(address.strip()) for address in text.split(",")]

    def get(self, path: str) -> Any:
        """The JSON at a path."""
        with self._open(path, "GET", {}) as response:
            return json.loads(response.read())

    def stream(self, path: str) -> Iterator[tuple[str, Any]]:
        """The server-sent events at a path, (name, data) each, until the lighthouse ends the stream.

        Raises:
            Unanswered: it does not answer, or is silent for longer than its stream ever is.
        """
        with self._open(path, "GET", {"Accept": "text/event-stream"}) as response:
            name = ""
            try:
                for line in response:
                    field, _, value = line.decode().rstrip("\n").partition(": ")
                    if field == "event":
                        name = value
                    elif field == "data":
                        yield name, json.loads(value)
            except OSError as e:
                raise Unanswered(f"the connection to the lighthouse broke: {e}") from None

    def kill(self, replica_id: str, token: str | None) -> str:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        with self._open(f"/replica/{quote(replica_id, safe='')}/kill", "POST", headers) as response:
            return bytes(response.read()).decode().strip()

    def _open(self, path: str, method: str, headers: dict[str, str]) -> Any:
        tried = []
        for address in self.addresses:
            request = urllib.request.Request(address + path, method=method, headers=headers)
            try:
                return urllib.request.urlopen(request, timeout=_TIMEOUT_SEC, context=_tls(address))
            except urllib.error.HTTPError as e:
                raise Unanswered(f"{address} answered {e.code}: {e.read().decode(errors='replace').strip()}") from None
            except OSError as e:
                tried.append(f"{address}: {getattr(e, 'reason', e)}")
        raise Unanswered(
            f"no lighthouse answered within {_TIMEOUT_SEC:g} s ({'; '.join(tried)}); is it running, and is "
            f"--lighthouse or {LIGHTHOUSE_ENV} its address?"
        )


def _checked(address: str) -> str:
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise Unanswered(f"the lighthouse address {address!r} is not allowed; allowed: http://host:port")
    return address.rstrip("/")


def _tls(address: str) -> ssl.SSLContext | None:
    if not address.startswith("https:"):
        return None
    context = ssl.create_default_context(cafile=os.environ.get("TORCHFT_TLS_CA"))
    cert, key = os.environ.get("TORCHFT_TLS_CERT"), os.environ.get("TORCHFT_TLS_KEY")
    if cert:
        context.load_cert_chain(cert, key)
    return context
