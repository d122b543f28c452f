"""Slots in the memory of other hosts, which their keepers serve (go/keeper).

Where every group has the whole state, a job goes on from the copy of any host that is left.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Optional
from urllib.parse import quote, urlsplit

from torchft._lighthouse_http import HttpLighthouse, Unanswered, direct, refusal_of, token_headers
from torchft.addresses import is_loopback
from torchft.checkpointing.client.progress import TransferProgress
from torchft.checkpointing.snapshots.gather import Source
from torchft.checkpointing.snapshots.shares import Share
from torchft.checkpointing.snapshots.slots import Slot, SlotError

_log = logging.getLogger(__name__)

# Keepers report every 2 s, so one that a lighthouse has not heard of within this time has nothing to say.
_ALL_HEARD_SEC = 2.5
_ANSWER_SEC = 5.0
# How long a keeper may take to say what it holds, and how many are asked at a time. The lighthouse does not
# list one that it has not heard of for as long.
_LIST_SEC, _AT_ONCE = 10.0, 32
# A source that sends less than _LEAST within this time is given up.
_PROGRESS_SEC = 10.0
_LEAST = 1 << 20  # bytes
_BLOCK = 1 << 20


class Held(NamedTuple):
    """A slot that a keeper holds.

    Attributes:
        address: of the keeper, ``http://host:port``.
        host: its name.
        job, group, rank, slot: which slot it is.
        ranks: number of ranks of its group.
        step, quorum: of the state.
        share: what of the state it has; None: all.
        stored: its file on the host's disk; empty: it is in memory.
    """

    address: str
    host: str
    job: str
    group: str
    rank: int
    slot: int
    ranks: int
    step: int
    quorum: int
    share: Optional[Share] = None
    stored: str = ""
    saved: float = 0.0

    @property
    def url(self) -> str:
        if self.stored:
            return f"{self.address}/stored/{quote(self.job, safe='')}/{quote(self.stored)}"
        names = (quote(self.job, safe=""), quote(self.group, safe=""), str(self.rank), str(self.slot))
        return "/".join((self.address, "snapshots", *names))


def held(lighthouse: str, job: str, say: Callable[[str], None] = lambda text: None) -> list[Held]:
    """Returns the complete slots of a job on all hosts, the newest first.

    The lighthouse knows the keepers, and what each has told it in the last seconds. That may be older than
    the end of the trainers before, so each keeper is asked what it holds. One that does not answer has
    nothing: a group that announced its copy, and could not load it, would have let the job begin before it.

    Args:
        lighthouse: its addresses, separated by commas.
        job: name under which the ranks keep slots.
        say: called with the reason for each slot that this version cannot fetch, and for each keeper that
            does not answer.

    Raises:
        SlotError: no lighthouse answers, or not as this version's does.
    """
    asked = HttpLighthouse(lighthouse, timeout=_ANSWER_SEC)
    # All keepers of this host have told a lighthouse of this host already, or are not needed.
    elsewhere = not all(is_loopback(urlsplit(one).hostname or "") for one in asked.addresses)
    until = time.monotonic() + (_ALL_HEARD_SEC if elsewhere else 0.0)
    while True:
        try:
            answer = asked.get("/api/v1/keepers")
            keepers, listening_ms = answer["keepers"], answer["listening_ms"]
        except (Unanswered, ValueError) as error:
            if time.monotonic() >= until:
                raise SlotError(f"snapshots on other hosts are not found: {error}") from None
        except (KeyError, TypeError) as error:
            raise _other_version("the lighthouse", error) from None
        else:
            missing = _ALL_HEARD_SEC - listening_ms / 1000
            if missing <= 0 or time.monotonic() >= until:
                return _complete(_asked(keepers, lighthouse, say), job, say)
        time.sleep(0.1)


def _asked(
    keepers: Sequence[dict[str, Any]], lighthouse: str, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Returns the keepers with what they hold at this moment."""

    def ask(keeper: dict[str, Any]) -> dict[str, Any]:
        try:
            listed = _listed(keeper["address"], lighthouse)
            return {**keeper, "snapshots": _present(keeper["snapshots"] or [], listed)}
        except (SlotError, KeyError, TypeError, AttributeError) as error:
            say(f"the copies of {keeper.get('host')} are not found, its keeper does not answer: {error}")
            return {**keeper, "snapshots": []}

    if not keepers:
        return []
    with ThreadPoolExecutor(min(len(keepers), _AT_ONCE), thread_name_prefix="torchft_keepers") as threads:
        return list(threads.map(ask, keepers))


def _present(told: Sequence[dict[str, Any]], listed: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the slots that a keeper lists, and those that only its report has: the keeper may know the
    lighthouse by another address.
    """
    place = ("job", "group", "group_rank", "slot", "stored")
    return list({tuple(slot.get(name) for name in place): slot for slot in (*told, *listed)}.values())


def _listed(address: str, lighthouse: str) -> Any:
    url = f"{address}/snapshots?lighthouse={quote(lighthouse, safe='')}"
    try:
        request = urllib.request.Request(url, headers=token_headers())
        with direct(address).open(request, timeout=_LIST_SEC) as response:
            return json.loads(b"".join(_blocks(response, url)))
    except urllib.error.HTTPError as error:
        with error:
            raise SlotError(str(refusal_of(url, error.code, error.read()))) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise SlotError(f"{address}: {getattr(error, 'reason', error)}") from None


def _complete(keepers: Sequence[dict[str, Any]], job: str, say: Callable[[str], None]) -> list[Held]:
    found = []
    for keeper in keepers:
        try:
            found += [
                Held(
                    keeper["address"],
                    keeper["host"],
                    job,
                    slot["group"],
                    slot["group_rank"],
                    slot["slot"],
                    slot["group_world_size"],
                    slot["step"],
                    slot["quorum"],
                    Share(*slot["share"]) if slot.get("share") else None,
                    slot.get("stored", ""),
                    slot.get("saved", 0.0),
                )
                for slot in keeper["snapshots"] or []
                if slot["job"] == job and not slot.get("incomplete")
            ]
        except (KeyError, TypeError) as error:
            say(str(_other_version(f"the keeper of {keeper.get('host')}", error)))
    return sorted(found, key=lambda one: (-one.step, -one.quorum, one.address))


def _other_version(what: str, error: Exception) -> SlotError:
    return SlotError(
        f"snapshots on other hosts are not found: {what} is of another version, its answer lacks {error}"
    )


def fetch(sources: Sequence[Held], into: Path, moved: Callable[[], None] = lambda: None) -> Slot:
    """Fetches a slot, from the first of several sources that sends it, and verifies it.

    Args:
        sources: slots with one state.
        into: a file that is written for the time of the call, in memory; the slot keeps its memory.
        moved: called as it gets on.

    Raises:
        SlotError: no source has sent it; the message has the cause of each.
    """
    causes = []
    for source in sources:
        try:
            try:
                _receive(source, into, moved)
                slot = Slot.open(into, moved=moved)
            finally:
                with suppress(FileNotFoundError):
                    into.unlink()
            header = slot.header
            if (header.step, header.quorum, header.group_rank) == (source.step, source.quorum, source.rank):
                return slot
            causes.append(f"{source.url} has step {header.step} now")
        except (SlotError, OSError) as error:
            causes.append(str(error))
    raise SlotError("; ".join(causes) or "there is no source")


def _receive(source: Held, into: Path, moved: Callable[[], None]) -> None:
    """Receives the bytes of a slot."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(into, flags, 0o600), "wb", buffering=0) as file:
        for block in _Connection(source).read(0, None):
            _write(file, block)
            moved()


def part(source: Held) -> Source:
    """Returns a slot of another host, of which a part is read."""
    return Source(source.url, None, _Connection(source).read)


class _Connection:
    """Reads a slot of another host. What it reads is of one state."""

    def __init__(self, source: Held) -> None:
        self._source = source
        self._tag = ""
        self._progress = TransferProgress(f"fetching {source.url}", _log)

    def read(self, offset: int, length: Optional[int]) -> Iterator[bytes]:
        """Yields the bytes from an offset; None: up to the end. A connection that breaks is made again, as
        long as something arrives. SlotError: they did not arrive.
        """
        source, done, total = self._source, 0, length
        if total == 0:
            return
        while True:
            before = done
            headers = token_headers()
            if self._tag:
                headers["If-Match"] = self._tag
            if done or length is not None:
                end = "" if length is None else offset + length - 1
                headers["Range"] = f"bytes={offset + done}-{end}"
            try:
                request = urllib.request.Request(source.url, headers=headers)
                with direct(source.address).open(request, timeout=_PROGRESS_SEC) as response:
                    self._tag = response.headers["ETag"]
                    total = done + int(response.headers["Content-Length"])
                    for block in _blocks(response, source.url):
                        done += len(block)
                        self._progress.count(len(block))
                        yield block
            except urllib.error.HTTPError as error:
                with error:
                    why = str(refusal_of(source.url, error.code, error.read()))
                if error.code == http.client.PRECONDITION_FAILED:
                    why = f"{source.url} was overwritten while it was read"
                raise SlotError(why) from None
            except TypeError:  # no length
                raise SlotError(f"{source.url} is of another version, or no keeper's") from None
            except (OSError, http.client.HTTPException) as error:
                if done == before:
                    reason = getattr(error, "reason", error) or type(error).__name__
                    raise SlotError(f"{source.url}: {reason}") from None
                continue
            if done == total and length in (None, done):
                return
            if done == before:
                raise SlotError(f"{source.url} ended the connection: its host may have overwritten the slot")


def _blocks(response: Any, url: str) -> Iterator[bytes]:
    began, arrived = time.monotonic(), 0
    while block := response.read1(_BLOCK):
        yield block
        arrived += len(block)
        if arrived >= _LEAST:
            began, arrived = time.monotonic(), 0
        elif time.monotonic() - began > _PROGRESS_SEC:
            raise SlotError(f"{url} has sent {arrived} bytes in {_PROGRESS_SEC:g} s")


def _write(file: Any, block: bytes) -> None:
    view = memoryview(block)
    while view:
        try:
            view = view[file.write(view) :]
        except OSError as error:
            raise SlotError(f"no room for a copy of another host: {error.strerror}") from error
