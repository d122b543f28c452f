"""Requests to a lighthouse over HTTP."""

from __future__ import annotations

import http.client
import json
import os
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from functools import lru_cache
from typing import Any
from urllib.parse import urlencode, urlsplit

from torchft._security import DEFAULT_JOB, JOB_ENV, TLS_CERT_ENV, tokens
from torchft._waits import announced
from torchft.addresses import host_port, lighthouses_of, loopback

DEFAULT_PORT = 29510
LIGHTHOUSE_ENV = "TORCHFT_LIGHTHOUSE"
_TIMEOUT_SEC = 5.0
_SILENT_SEC = 2.0  # a request that takes longer is announced
# No leader is reached from this lighthouse; another one of the cluster may reach it.
_ELSEWHERE = (502, 503, 504)


class Unanswered(Exception):
    """The lighthouse did not answer, or refused the request. The message names the addresses that were tried.

    Attributes:
        code: the HTTP status code of a refusal; None if there was no answer.
    """

    def __init__(self, text: str, code: int | None = None) -> None:
        super().__init__(text)
        self.code = code

    @property
    def refused(self) -> bool:
        """Whether the lighthouse refused the request, so that a retry is useless."""
        return self.code is not None and self.code < 500


class HttpLighthouse:
    """The lighthouse at ``http://host:port``, or a cluster: requests go to the first of its lighthouses that
    serves.

    Args:
        addresses: address, or those of a cluster, separated by commas, or a file of them, which each request
            reads; default: TORCHFT_LIGHTHOUSE, else this machine.
        job: name of the job; default: TORCHFT_JOB_ID, else the lighthouse's unnamed job.
        timeout: seconds until the first byte of an answer.
        polls: whether requests wait for a change, so that a long one is not announced.

    Raises:
        Unanswered: an address is malformed.
    """

    def __init__(
        self,
        addresses: str | None,
        job: str | None = None,
        *,
        timeout: float = _TIMEOUT_SEC,
        polls: bool = False,
    ) -> None:
        self._timeout = timeout
        self._polls = polls
        self._served = ""  # the address that has served last, which is asked first
        usual = f"http://{host_port(loopback(), DEFAULT_PORT)}"
        self._setting = addresses or os.environ.get(LIGHTHOUSE_ENV) or usual
        self.job = job or os.environ.get(JOB_ENV) or DEFAULT_JOB
        _ = self.addresses

    @property
    def addresses(self) -> list[str]:
        """The addresses at present. Unanswered: one is malformed, or their file cannot be read."""
        try:
            return [checked(address) for address in lighthouses_of(self._setting)]
        except OSError as e:
            raise Unanswered(f"{LIGHTHOUSE_ENV}={self._setting}: {e.strerror}") from None

    def get(self, path: str) -> Any:
        """The JSON at ``/status``, ``/jobs``, ``/cluster``, ``/api/v1/history`` or ``/api/v1/keepers``.

        Raises:
            Unanswered: no lighthouse answers, or the server at the address is not a lighthouse.
        """
        with self._open(path, "GET", {"Accept": "application/json"}) as response:
            answer = _json(response)
            if not _fits(path, answer):
                raise Unanswered(f"{response.url} answered other JSON: is it a lighthouse?")
            return answer

    def stream(self, path: str) -> Iterator[tuple[str, Any]]:
        """The server-sent events at a path, (name, data) each, until the lighthouse ends the stream.

        Raises:
            Unanswered: the lighthouse does not answer, or sends nothing for ``timeout`` seconds. Its streams
                send more often than the default timeout.
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
            except (OSError, http.client.HTTPException) as e:
                raise _broken(e) from None
            except ValueError:
                raise _no_json(response) from None

    def post(self, path: str, value: Any, timeout: float | None = None) -> Any:
        """Sends JSON, with the token of TORCHFT_TOKEN_FILE if set, and returns the JSON of the answer.

        Args:
            path: of the request.
            value: what is sent.
            timeout: seconds until the first byte of the answer; default: that of this object.

        Raises:
            Unanswered: no lighthouse answers, or one refuses; or TORCHFT_TOKEN_FILE cannot be read.
        """
        try:
            headers = token_headers()
        except ValueError as e:
            raise Unanswered(str(e), 401) from None
        with self._open(path, "POST", headers, json.dumps(value).encode(), timeout) as response:
            return _json(response)

    def ask(self, what: str, **body: str | int) -> str:
        """Requests a change, with the token of TORCHFT_TOKEN_FILE if set.

        Args:
            what: ``kill`` or ``drain`` a ``replica_id``; ``max_replicas``: how many groups train, as further
                ones are standbys; ``cluster/add`` or ``cluster/remove`` the lighthouse at an ``address``;
                ``scaled`` and ``bad_node`` make a ``reason`` an event of the job.
            body: the arguments of the request.

        Returns:
            what was done.

        Raises:
            Unanswered: as :meth:`post`.
        """
        answer = self.post(f"/api/v1/{what}", body)
        if not isinstance(answer, dict) or "done" not in answer:
            raise Unanswered(f"{self._served} answered other JSON: is it a lighthouse?")
        return str(answer["done"])

    def _open(
        self,
        path: str,
        method: str,
        headers: dict[str, str],
        body: bytes | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Asks the lighthouses of a cluster one after another, until one serves or refuses."""
        timeout = self._timeout if timeout is None else timeout
        if self.job != DEFAULT_JOB:
            path += f"{'&' if '?' in path else '?'}{urlencode({'job': self.job})}"
        tried: list[Unanswered] = []
        for address in sorted(self.addresses, key=lambda one: one != self._served):
            request = urllib.request.Request(address + path, data=body, method=method, headers=headers)
            try:
                response = self._ask_one(address, request, timeout)
            except Unanswered as e:
                if e.code is not None and e.code not in _ELSEWHERE:
                    raise
                tried.append(e)
            else:
                self._served = address
                return response
        why, codes = "; ".join(map(str, tried)), [e.code for e in tried if e.code is not None]
        if codes or self._polls:
            raise Unanswered(why, codes[-1] if codes else None)
        raise Unanswered(
            f"no lighthouse answered ({why}); is it running, and is --lighthouse or {LIGHTHOUSE_ENV} its "
            "address?"
        )

    def _ask_one(self, address: str, request: urllib.request.Request, timeout: float) -> Any:
        try:
            waiting = f"waiting for the lighthouse at {address}, at most {timeout:g} s"
            silent = announced(_SILENT_SEC, print, waiting, file=sys.stderr, flush=True)
            with nullcontext() if self._polls else silent:
                return direct(address).open(request, timeout=timeout)
        except urllib.error.HTTPError as e:
            with e:
                raise refusal_of(address, e.code, _body(e)) from None
        # HTTPException: the server does not speak HTTP; UnicodeError: the host cannot be a name in the DNS
        except (OSError, http.client.HTTPException, UnicodeError) as e:
            reason = getattr(e, "reason", e)
            late = isinstance(reason, TimeoutError)
            why = f"no answer within {timeout:g} s" if late else reason
            raise Unanswered(f"{address}: {why}") from None


def tell_bad_node(lighthouse: str, job: str, node: str, reasons: Iterable[str]) -> str:
    """Makes it an event of a job that a host should not train. Returns why it is none; empty: it is one."""
    try:
        text = f"node {node} should not train: {'; '.join(reasons)}"
        HttpLighthouse(lighthouse, job).ask("bad_node", reason=text)
    except Unanswered as e:
        return f"this is no event of the job: {e}"
    return ""


def address_of(endpoint: str) -> str:
    """The address of a lighthouse given as HOST:PORT, or those of a cluster, separated by commas: https if
    the environment names certificates, else http.

    Raises:
        ValueError: `endpoint` has something that is neither HOST:PORT nor an address.
    """
    tls = os.environ.get(TLS_CERT_ENV) or os.environ.get("TORCHFT_TLS_CA")
    each = [one.strip() for one in endpoint.split(",")]
    addresses = [one if "://" in one else f"{'https' if tls else 'http'}://{one}" for one in each]
    try:
        return ",".join(map(checked, addresses))
    except Unanswered:
        raise ValueError(
            f"endpoint {endpoint!r} is not allowed; allowed: HOST:PORT, http://HOST:PORT"
        ) from None


def direct(address: str) -> urllib.request.OpenerDirector:
    """Opens requests to a lighthouse without a proxy of the environment, as all connections of a job."""
    tls = _tls(address)
    return _without_tls() if tls is None else _opener(urllib.request.HTTPSHandler(context=tls))


@lru_cache
def _without_tls() -> urllib.request.OpenerDirector:
    return _opener()  # once: it reads the system's certificates, which takes some 10 ms


def _opener(*handlers: urllib.request.BaseHandler) -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), *handlers)


# A field that each answer has.
_FIELD = {
    "/status": "members",
    "/cluster": "leader",
    "/api/v1/history": "events",
    "/api/v1/keepers": "keepers",
}


def _fits(path: str, answer: Any) -> bool:
    """Whether an answer can be a lighthouse's."""
    if path == "/jobs":
        return isinstance(answer, list) and all(isinstance(job, dict) and "job" in job for job in answer)
    return isinstance(answer, dict) and _FIELD[path] in answer


def _body(response: Any) -> bytes:
    try:
        return response.read()
    except (OSError, http.client.HTTPException) as e:
        raise _broken(e) from None


def _json(response: Any) -> Any:
    try:
        return json.loads(_body(response))
    except ValueError:
        raise _no_json(response) from None


def _no_json(response: Any) -> Unanswered:
    return Unanswered(f"{response.url} answered without JSON: is it a lighthouse?", 404)


def _broken(error: Exception) -> Unanswered:
    return Unanswered(f"the connection to the lighthouse broke: {error}")


def token_headers() -> dict[str, str]:
    """The headers of a request with JSON, with the token of TORCHFT_TOKEN_FILE if there is one."""
    token = next(iter(tokens()), None)
    return {"Content-Type": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}


def refusal_of(address: str, code: int, body: bytes) -> Unanswered:
    """The error for a refusal: with the `error` of the API's JSON, else with the text of the answer."""
    try:
        return Unanswered(f"{address}: {json.loads(body)['error']}", code)
    except (ValueError, KeyError, TypeError):
        return Unanswered(f"{address} answered {code}: {body.decode(errors='replace').strip()}", code)


def checked(address: str) -> str:
    """The address of a lighthouse. Unanswered: it is malformed."""
    try:
        parts = urlsplit(address)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port
    except ValueError:  # the port is not a number
        usable = False
    if not usable:
        raise Unanswered(f"the lighthouse address {address!r} is not allowed; allowed: http://host:port")
    return address.rstrip("/")


def _tls(address: str) -> ssl.SSLContext | None:
    if not address.startswith("https:"):
        return None
    ca, cert, key = (os.environ.get(name) for name in ("TORCHFT_TLS_CA", TLS_CERT_ENV, "TORCHFT_TLS_KEY"))
    try:
        context = ssl.create_default_context(cafile=ca)
        if cert:
            context.load_cert_chain(cert, key)
    except OSError as e:
        settings = f"TORCHFT_TLS_CA={ca!r}, {TLS_CERT_ENV}={cert!r}, TORCHFT_TLS_KEY={key!r}"
        raise Unanswered(
            f"{settings}: {e.strerror or e}; allowed: files of certificates and of a key", 400
        ) from None
    return context
