"""Serves small parts of a state over HTTP, each with its content between two steps of the source's optimizer.

A source opens its *window* when a step begins, and closes it before its weights change. While the window is open,
requests are answered from the present state; otherwise they wait for the next window. A copy in progress keeps the
window open, so parts must be small. The *head* of a step describes its pieces; it can also be requested later. The
*decision*, whether the source has committed the step, can be requested as soon as it is known.

    GET /checkpoint/along/{kind}/{argument}      kind: head, piece, digest, decision, or rest
    200   lengths, and CRC32 of the JSON (3 * 4 bytes); JSON with the digests of all ranges of memory; memory
"""

from __future__ import annotations

import json
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from typing import Any, NamedTuple, Optional, Protocol

import torch

from torchft.checkpointing._digest import digest_bytes
from torchft.checkpointing._http_client import Refused, _connection, _reason
from torchft.checkpointing._metadata import read
from torchft.checkpointing._pacer import Pacer
from torchft.checkpointing._source import Unavailable
from torchft.checkpointing.transport import CheckpointError, CheckpointTimeout
from torchft.http import _DeadlineSocket

PART = "along"
REST = "rest"  # the argument is the step
DECISION = "decision"  # the argument is STEP-QUORUM_ID
_FRAME = struct.Struct(">III")  # bytes of the JSON, bytes of the memory, CRC32 of the JSON
_LARGEST = 1 << 30  # bytes of an answer
# Number of heads that a source keeps: a target applies the gradient of a step in a later one, and needs its head then.
_HEADS = 64
# Seconds in which a source must accept a connection: its host may have vanished, and the next quorum names another one.
_CONNECT_SEC = 5.0
# Seconds without a request after which a target connects again. A source closes such a connection after 30 s
# (http_transport._REQUEST_TIMEOUT), and a step may take longer.
_IDLE_SEC = 20.0


class Giver(Protocol):
    """The pieces that a source serves in one step."""

    def give(self, kind: str, argument: str) -> tuple[Any, list[torch.Tensor]]:
        """A copy of a part: JSON, and flat tensors of bytes.

        Raises:
            ValueError: there is no such part.
        """
        ...

    def whole(self) -> None:
        """Offers the state as a whole."""
        ...


class Window:
    """The times at which a source's state may be read.

    Args:
        pacer: limits the parts that are sent.

    Attributes:
        used: whether this source opens the window at all; if not, requests are refused at once.
    """

    used = False

    def __init__(self, pacer: Pacer) -> None:
        self._pacer = pacer
        self._cond = threading.Condition()
        self._giver: Optional[Giver] = None  # None: not open
        self._step = -1  # the step whose state can be read
        self._noted = -1
        self._closed = -1  # the step whose state was read last
        self._heads: dict[int, Any] = {}
        self._decided: Optional[tuple[int, int]] = None  # step and quorum of the attempt that was decided last
        self._committed = False  # whether that attempt was committed
        self._wants_whole: Optional[int] = None  # the step whose whole state was requested and could not be offered
        self._whole = -1  # the step whose whole state was offered since the window was opened last
        self._whole_again = -1  # the step whose whole state was requested once more after that, with the window closed
        self._offered_whole = False
        self._closing = False
        self._ended = False

    def note(self, step: int, head: Any) -> None:
        """Called when a step begins.

        Args:
            step: step number.
            head: the description that targets need, as JSON.
        """
        with self._cond:
            self._noted = step
            self._heads[step] = head
            while len(self._heads) > _HEADS:
                del self._heads[next(iter(self._heads))]
            self._cond.notify_all()

    def open(self, step: int, giver: Giver) -> None:
        """Opens the window: the state of a step may be read."""
        with self._cond:
            self._step, self._giver, self._closing = step, giver, False
            self._offered_whole, self._whole = False, -1
            # A target that requested the whole state too late for its step heals in this step.
            late = self._wants_whole is not None and step - self._wants_whole <= 2
            again, self._whole_again = self._whole_again == step, -1  # in another attempt at the step
            if late or again:
                self._offer_whole(giver)
            self._cond.notify_all()

    def _offer_whole(self, giver: Giver) -> None:
        self._offered_whole, self._wants_whole = True, None
        giver.whole()

    def close(self) -> None:
        """Closes the window: after this call the state is not read."""
        self._closing = True  # without the lock, so that no request that waits for the lock reads first
        with self._cond:
            if self._giver is not None:
                self._giver, self._closed = None, self._step
                self._cond.notify_all()

    def decide(self, step: int, quorum_id: int, committed: bool) -> None:
        """Called when an attempt at a step was decided; :meth:`close` follows."""
        self._closing = True  # as there: no request that waits for the lock reads before this call
        with self._cond:
            self._decided, self._committed = (step, quorum_id), committed
            self._cond.notify_all()

    def end(self) -> None:
        """Ends all waits."""
        with self._cond:
            self._ended = True
            self._cond.notify_all()

    def want_whole(self, step: int) -> None:
        """Called when a target requests the whole state of a step."""
        with self._cond:
            if step == self._whole:
                if self._giver is None:
                    self._whole_again = step
            elif self._giver is None or self._step != step or self._closing:
                self._wants_whole = step
            elif not self._offered_whole:
                self._offer_whole(self._giver)

    def note_whole(self, step: int) -> None:
        """Called when the whole state of a step is offered: a request for it is not too late for this step."""
        with self._cond:
            self._whole = step
            if self._wants_whole == step:
                self._wants_whole = None

    def answer(self, path: str, timeout: float) -> list[memoryview]:
        """The answer to a request.

        Args:
            path: its path, after `along/`
            timeout: seconds until the window must have opened

        Raises:
            ValueError: there is no such part
            TimeoutError: no window opened in that time
            Unavailable: the source is shut down
        """
        if not self.used:
            raise ValueError("this source gives its state as a whole")
        kind, _, argument = path.partition("/")
        if kind == "head":
            with self._cond:
                step = int(argument)
                self._wait(lambda: step <= self._noted, timeout)
                # A source that was not in that step has no head of it, and answers null. The target then does not wait
                # for the source's decision on that step, which does not exist either.
                return _framed({"step": step, "value": self._heads.get(step)}, [])
        if kind == DECISION:
            attempt, value = (int(argument.partition("-")[0]), int(argument.partition("-")[2])), None
            with self._cond:
                self._wait(lambda: self._decided is not None and self._decided >= attempt, timeout)
                if self._decided == attempt:
                    value = self._committed
            return _framed({"step": attempt[0], "value": value}, [])
        with self._cond:
            # The rest is needed in this step only. The next window opens after the step, which the target ends only
            # after it has the answer: a request that waited for the next window would be a deadlock.
            missed = int(argument) if kind == REST else None
            self._wait(lambda: self._is_open() or (missed is not None and missed <= self._closed), timeout)
            if not self._is_open():
                return _framed({"step": missed, "value": None}, [])
            assert self._giver is not None
            step = self._step
            value, memory = self._giver.give(kind, argument)
        answer = _framed({"step": step, "value": value}, memory)
        self._pacer.wait(sum(part.nbytes for part in answer))
        return answer

    def _is_open(self) -> bool:
        return self._giver is not None and not self._closing

    def _wait(self, ready: Callable[[], bool], timeout: float) -> None:
        if not self._cond.wait_for(lambda: self._ended or ready(), timeout):
            raise TimeoutError(f"timed out after {timeout:g} s: no step of this source gave parts of its state")
        if self._ended:
            raise Unavailable("this source is shut down")


class Answer(NamedTuple):
    """The answer of a source."""

    step: int
    value: Any
    memory: torch.Tensor  # flat bytes


class Asker:
    """Requests parts from one source, on one connection.

    Args:
        metadata: metadata of its transport
        token: the proof that the source requires, if any
        timeout: timeout of each request, in seconds
    """

    def __init__(self, metadata: str, token: str, timeout: float) -> None:
        self._hosts, self._port, self._path = read(metadata)
        self._token = token
        self._timeout = timeout
        self._open = ExitStack()
        self._connection: Optional[tuple[HTTPConnection, _DeadlineSocket]] = None
        self._answered_at = 0.0

    def ask(self, kind: str, argument: str) -> Answer:
        """Requests a part.

        Raises:
            Refused: the source has no such part, or does not give parts
            CheckpointError, CheckpointTimeout: it was not reached, or its answer is damaged
        """
        what = f"{kind} {argument} from {self._hosts[0]} port {self._port}"
        with self._errors(what):
            connection, sock = self._connect()
            sock.deadline = time.monotonic() + self._timeout
            headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
            connection.request("GET", f"{self._path}{PART}/{kind}/{argument}", headers=headers)
            response = connection.getresponse()
            if response.status != HTTPStatus.OK:
                # The source is shut down or gives nothing now; the next quorum may name another one.
                error = CheckpointError if response.status == HTTPStatus.SERVICE_UNAVAILABLE else Refused
                raise error(f"{what}: refused with {response.status}: {_reason(response)}")
            frame = bytearray(_FRAME.size)
            _fill(response, frame)
            lengths = _FRAME.unpack(frame)
            if sum(lengths[:2]) > _LARGEST:
                raise CheckpointError(f"{what}: an answer of {sum(lengths[:2])} bytes")
            body = bytearray(sum(lengths[:2]))
            _fill(response, body)
            response.read()
            text, memory = body[: lengths[0]], torch.frombuffer(body, dtype=torch.uint8)[lengths[0] :]
            if zlib.crc32(text) != lengths[2]:
                raise CheckpointError(f"{what}: the answer is damaged")
            header = json.loads(text)
            sizes = [nbytes for nbytes, _ in header["memory"]]
            fit = min(sizes, default=0) >= 0 and sum(sizes) == lengths[1]
            if not fit or _digests(memory.split(sizes)) != header["memory"]:
                raise CheckpointError(f"{what}: the answer is damaged")
            self._answered_at = time.monotonic()
            return Answer(int(header["step"]), header["value"], memory)

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.close()
            if isinstance(error, TimeoutError) and not isinstance(error, CheckpointTimeout):
                raise CheckpointTimeout(f"{what}: timed out after {self._timeout:g} s") from error
            if isinstance(error, (OSError, HTTPException, ValueError, KeyError, TypeError)):
                raise CheckpointError(f"{what}: {type(error).__name__}: {error}") from error
            raise

    def _connect(self) -> tuple[HTTPConnection, _DeadlineSocket]:
        if self._connection is not None and time.monotonic() - self._answered_at > _IDLE_SEC:
            self.close()
        if self._connection is None:
            deadline = time.monotonic() + min(self._timeout, _CONNECT_SEC)
            self._connection = self._open.enter_context(
                _connection(self._hosts, self._port, deadline, lambda sock: None)
            )
        return self._connection

    def abort(self) -> None:
        """Makes an :meth:`ask` on another thread end with an error."""
        connection = self._connection
        if connection is not None:
            connection[1].abort()

    def close(self) -> None:
        """Closes the connection; the next request opens another one."""
        self._connection = None
        self._open.close()


def _framed(value: dict[str, Any], memory: list[torch.Tensor]) -> list[memoryview]:
    text = json.dumps({**value, "memory": _digests(memory)}, separators=(",", ":")).encode()
    views = [memoryview(part.numpy().data).cast("B") for part in memory if part.numel()]
    frame = _FRAME.pack(len(text), sum(view.nbytes for view in views), zlib.crc32(text))
    return [memoryview(frame), memoryview(text), *views]


def _digests(memory: Sequence[torch.Tensor]) -> list[list[int]]:
    """The length and the digest of each range of memory."""
    return [[part.numel(), int(digest_bytes(part))] for part in memory]


def _fill(response: Any, body: bytearray) -> None:
    view = memoryview(body)
    while view:
        count = response.readinto(view)
        if not count:
            raise ConnectionError("the answer ends early")
        view = view[count:]
